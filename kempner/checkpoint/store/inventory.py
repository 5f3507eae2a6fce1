"""Lists the contents of a checkpoint folder without reading files in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kempner.checkpoint.format.manifest import Manifest, digest, read
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder, parse_aside, parse_step
from kempner.checkpoint.io.verify_log import Finding, read_findings
from kempner.run.process.exit_codes import DataError, UsageError
from kempner.run.record.recorded_config import checkpoint_folder
from kempner.run.record.run_dir import RunDirectory


@dataclass(frozen=True)
class Item:
    """One checkpoint: committed, set aside, or without a manifest.

    `problem` is what is known to be wrong with it, by its manifest and the lengths of its files;
    `finding` is what the last full verification found. `note` places it: `latest`, set aside, ...
    """

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None
    finding: Finding | None
    note: str


def locate(directory: Path) -> tuple[CheckpointFolder, Path | None]:
    """The checkpoint folder that is meant by a run's directory, its checkpoints, or one of them.

    In the last case the second value is that checkpoint. Raises `UsageError` if there is nothing.
    """
    inside = checkpoint_folder(RunDirectory(directory))
    folder = CheckpointFolder(inside if inside.is_dir() else directory)
    if any(_ours(folder)):
        return folder, None
    single = directory.resolve()  # `latest` is such a name, too
    if (single / MANIFEST).is_file():
        return CheckpointFolder(single.parent), single
    if RunDirectory(directory).ledger.exists():
        raise UsageError(
            f"{directory} has no checkpoint in {inside} yet; the run writes one every "
            "checkpoint.interval steps, and when it is stopped"
        )
    raise UsageError(
        f"{directory} contains no checkpoint; name a run's directory, the folder that contains its "
        "step-... folders, or one of those"
    )


def checkpoints_of(directory: Path) -> Path:
    """Where the checkpoints of a run go, whose directory, or checkpoint folder, need not be there.

    A folder is taken for the checkpoints themselves if it is called so or has some.
    """
    inside = RunDirectory(directory).checkpoints
    itself = directory.name == inside.name or any(_ours(CheckpointFolder(directory)))
    return directory if itself else inside


def pick(folder: CheckpointFolder, only: Path | None, step: int | None) -> Path:
    """The one checkpoint that is meant: `only`, or that of `step`, or `latest`.

    Raises `UsageError` if there is no such thing.
    """
    if only is not None:
        if step is not None and parse_step(only.name) != step:
            raise UsageError(f"{only} is not the checkpoint of step {step}; remove --step")
        return only
    wanted = folder.latest() if step is None else step
    if wanted is None:
        raise UsageError(f"{folder.path} has no `latest`; name a checkpoint with --step")
    return at_step(folder, wanted)


def at_step(folder: CheckpointFolder, step: int) -> Path:
    """The committed checkpoint of a step. Raises `UsageError`, naming what there is."""
    committed = folder.committed()
    if step not in committed:
        there = ", ".join(map(str, committed)) or "none"
        raise UsageError(f"step {step} is not committed in {folder.path}; these are: {there}")
    return folder.step(step)


def survey(folder: CheckpointFolder) -> list[Item]:
    """Everything in a folder that is a checkpoint of ours, by step; costs a stat(2) per file."""
    findings, latest = read_findings(folder.path), folder.latest()
    items = [_examine(path, step, latest, findings) for path, step in _ours(folder)]
    return sorted(items, key=lambda item: (item.step, item.path.name))


def _ours(folder: CheckpointFolder) -> Iterator[tuple[Path, int]]:
    for path in folder.path.iterdir() if folder.path.is_dir() else ():
        aside, step = parse_aside(path.name), parse_step(path.name)
        if aside is not None or step is not None:
            yield path, aside.step if aside else step or 0


def _examine(path: Path, step: int, latest: int | None, findings: dict[str, Finding]) -> Item:
    note = _note(path.name, step, latest)
    if not (path / MANIFEST).exists():
        return Item(path, step, None, "no manifest: never committed, or partly deleted", None, note)
    try:
        manifest = read(path)
    except DataError:
        return Item(path, step, None, f"{MANIFEST} is damaged", None, note)
    problem = next(_wrong_lengths(path, manifest), None)
    return Item(path, step, manifest, problem, findings.get(digest(manifest)), note)


def _note(name: str, step: int, latest: int | None) -> str:
    if aside := parse_aside(name):
        what = "made again" if aside.why == "abandoned" else "found damaged"
        return f"{aside.why}: {what} by attempt {aside.attempt}"
    if latest is None or step < latest:
        return ""
    return "latest" if step == latest else "beyond latest: from an abandoned branch"


def _wrong_lengths(path: Path, manifest: Manifest) -> Iterator[str]:
    for name, entry in manifest.files.items():
        try:
            length = (path / name).stat().st_size
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            continue
        if length != entry.bytes:
            yield f"{name} has {length} bytes instead of {entry.bytes}"
