"""Checks of storage and data: shared folders, room for checkpoints, caches, readable data of the
right vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from kempner.checkpoint.store.commit import judge_room
from kempner.config.sections import Config, HeldOutFolder
from kempner.data.files.index import check_held_out, check_samples, vocabulary
from kempner.insight.doctor.facts.nodes import Survey
from kempner.insight.doctor.facts.storage import DataSet, Disk, RunState
from kempner.insight.doctor.finding import (
    CheckOutcome,
    Finding,
    Level,
    fail,
    finding,
    passed,
    per_node,
    skipped,
    warn,
)
from kempner.probe.node import ProbeResult
from kempner.run.output.units import count
from kempner.run.process.durable_io import FileSystem
from kempner.run.process.exit_codes import RunError

_FILES_BESIDE = 16
"""Inodes of a checkpoint besides the ranks' files: manifest, metadata, the folder, with a
margin."""

_FILES_OF_A_RANK = 2  # its shard, and the checksums of that


def check_run(run: RunState) -> CheckOutcome:
    if run.gave_up:
        return fail(f"{run.path} was given up ({run.gave_up}): correct that, and delete GAVE_UP")
    if run.running is None:
        return warn(f"{run.path}: whether it is running cannot be told from here")
    if run.running:
        return passed(f"{run.path} is running: nothing that would slow it down is done")
    return passed(f"{run.path} can be started")


def check_room(disk: Disk, size: int | None, keep: int) -> CheckOutcome:
    """Check the space for `keep` + 1 checkpoints of `size` bytes (None if only a rank knows it)."""
    if disk.trouble:
        return fail(f"{disk.existing} cannot be looked at: {disk.trouble}; set checkpoint.dir")
    if size is None:
        return skipped("how large a checkpoint of your own model is shows only after the first one")
    room = judge_room(disk.free, size, disk.committed, keep)
    if room.sentence:
        # Old checkpoints may be deleted, so a start may still succeed.
        level = Level.FAIL if room.refused else Level.WARN
        return CheckOutcome(level, f"{disk.folder}: {room.sentence}")
    more = max(1, keep + 1 - disk.committed)
    return passed(
        f"{disk.folder}: room for {disk.free // max(1, size):,} checkpoints, {more} to come"
    )


def check_file_system(folder: str, able: FileSystem) -> CheckOutcome:
    if refusal := able.refusal(Path(folder)):
        return fail(refusal)
    if remarks := list(able.remarks()):
        return warn(f"{folder}: {'; '.join(remarks)}")
    if able == FileSystem():
        return skipped(f"{folder}: what its file system can do shows only when it can be written")
    return passed(f"{folder}: links, exclusive creation, renames, modes and fsync work")


def check_inodes(disk: Disk, ranks: int, keep: int) -> CheckOutcome:
    if disk.trouble or disk.inodes is None:
        return skipped("the file system counts no inodes")
    needed = max(1, keep + 1 - disk.committed) * (_FILES_OF_A_RANK * ranks + _FILES_BESIDE)
    if disk.inodes < needed:
        return fail(
            f"{disk.existing}: {disk.inodes} more files can be made, and checkpoints of "
            f"{count(ranks, 'rank')} need {needed}: delete files, or "
            "set checkpoint.dir to another disk"
        )
    return passed(f"{disk.inodes:,} more files can be made, {needed:,} are needed")


def check_shared(survey: Survey) -> list[Finding]:
    check = "shared folders"
    unwritable = [
        finding(check, fail(f"{folder} cannot be written: {why}; set run.dir or checkpoint.dir"))
        for folder, why in survey.unwritable.items()
    ]

    def judge(answer: ProbeResult) -> CheckOutcome:
        troubles = [answer.troubles[f] for f in survey.shared if f in answer.troubles]
        for folder in survey.unseen.get(answer.node, ()):
            troubles.append(f"{folder} does not show elsewhere what the node writes")
        if troubles:
            sentence = "; ".join(troubles)
            return fail(f"{sentence}: use a folder on the file system that all nodes share")
        if len(survey.asked) == 1:
            return passed("can be written and read")
        return passed("what a node writes is seen by the others")

    return [*unwritable, *per_node(check, survey.answers, judge)]


def check_copies(answers: Sequence[ProbeResult], wanted: Mapping[str, str]) -> list[Finding]:
    """Check that all nodes see the same data; `wanted` maps each file compared to its folder."""
    found = []
    for file, folder in wanted.items():
        digests = {answer.node: answer.details.digests.get(file, "") for answer in answers}
        if not any(digests.values()):
            continue  # no node sees it, which another check reports
        ((usual, _),) = Counter(filter(None, digests.values())).most_common(1)
        missing = [node for node, digest in digests.items() if not digest]
        other = [node for node, digest in digests.items() if digest not in ("", usual)]
        for nodes, what in ((missing, "cannot be read"), (other, "is another data set")):
            if nodes:
                sentence = f"{folder} {what} there: copy it, or use a folder that all nodes share"
                found.append(finding("data on nodes", fail(sentence), nodes))
    if not found and len(answers) > 1 and wanted:
        found.append(finding("data on nodes", passed("every node sees the same data")))
    return found


def check_caches(
    answers: Sequence[ProbeResult], offline: Sequence[str], needed: bool
) -> list[Finding]:
    """Check the caches that a run without network reads. `offline` are the variables that are set
    for that; `needed`: the model is the user's own, and may load from the caches."""
    if not offline:
        return []

    def judge(answer: ProbeResult) -> CheckOutcome:
        troubles = [f"{folder} {why}" for folder, why in answer.details.caches.items()]
        if troubles:
            message = (
                f"{' and '.join(offline)} is set, and {'; '.join(troubles)}: fill it where there "
                "is network (kempner download), and set HF_HOME to a folder that all nodes share"
            )
            return fail(message) if needed else warn(message)
        return passed(f"{' and '.join(offline)} is set, and its cache is there")

    return per_node("offline caches", answers, judge)


def check_data(
    config: Config, data: DataSet, held_out: Mapping[HeldOutFolder, DataSet]
) -> list[Finding]:
    found = [finding("data", _present(data)), finding("tokenizer", _tokenizer(config, data))]
    for named, one in held_out.items():
        found.append(finding("held-out data", _held_out(config, data, named, one)))
    return found


def _present(data: DataSet) -> CheckOutcome:
    if data.index is None:
        return fail(data.trouble)
    if data.unreadable:
        return fail(data.unreadable)
    index = data.index
    return passed(f"{data.folder}: {index.tokens:,} tokens in {count(len(index.shards), 'file')}")


def _tokenizer(config: Config, data: DataSet) -> CheckOutcome:
    if data.index is None:
        return skipped(f"not known, since {data.key}={data.folder} cannot be used")
    if data.tokenizer:
        return fail(data.tokenizer)
    try:
        size = vocabulary(config, data.index)
        check_samples(config, data.index)
    except RunError as error:
        return fail(str(error))
    name = data.index.tokenizer_name or data.index.tokenizer.kind
    return passed(f"{name}: {data.index.vocab_size} token ids, the model has {size}")


def _held_out(
    config: Config, data: DataSet, named: HeldOutFolder, held_out: DataSet
) -> CheckOutcome:
    trouble = held_out.trouble or held_out.unreadable or held_out.tokenizer
    if trouble:
        return fail(trouble)
    if data.index is not None and held_out.index is not None:
        try:
            check_held_out(config, data.index, named, held_out.index)
        except RunError as error:
            return fail(str(error))
    tokens = 0 if held_out.index is None else held_out.index.tokens
    return passed(f"{held_out.folder}: {tokens:,} tokens")
