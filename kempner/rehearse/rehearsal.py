"""Runs a program undisturbed, then with stops and kills, and keeps what was seen.

The files that a rehearsed program writes outside of its run.

Where a rehearsed program is stopped and killed: at the boundaries that it has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from kempner.rehearse.compare import RankRecord, read_record
from kempner.rehearse.stage import Stage
from kempner.run.control.rehearsal import RehearsalPart
from kempner.run.process.exit_codes import ExitCode, UsageError

OF_TENSORS = {".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npy", ".npz"}
"""Endings of files that hold what was trained."""

DEEPEST, MOST_FILES, LARGEST = 4, 5000, 1 << 28


@dataclass(frozen=True)
class FileDigests:
    """Digests of files by their paths."""

    digests: Mapping[str, str] = field(default_factory=dict)

    def differing(self, other: FileDigests) -> list[str]:
        """The files that both have, with other contents."""
        common = self.digests.keys() & other.digests.keys()
        return sorted(path for path in common if self.digests[path] != other.digests[path])


def listing(folder: Path, scratch: Path) -> dict[str, tuple[int, int]]:
    """Time and size of the files below a folder, as far as they are seen at a glance."""
    found: dict[str, tuple[int, int]] = {}
    for place, folders, names in os.walk(folder):
        here = Path(place)
        deep = len(here.relative_to(folder).parts) >= DEEPEST
        folders[:] = [] if deep else [f for f in folders if not _passed_over(here / f, scratch)]
        for name in names:
            path = here / name
            if path.is_symlink() or len(found) >= MOST_FILES:
                continue
            facts = path.stat()
            found[str(path)] = (facts.st_mtime_ns, facts.st_size)
    return found


def _passed_over(folder: Path, scratch: Path) -> bool:
    return folder.name.startswith(".") or folder.name == "__pycache__" or folder == scratch


def changed_files(
    records: Iterable[RankRecord], before: Mapping[str, tuple[int, int]], scratch: Path
) -> list[str]:
    """The files that the program has written, as it told and as its folder shows."""
    told = {path for record in records for path in record.wrote if Path(path).is_file()}
    now = listing(Path.cwd(), scratch)
    return sorted(told | {path for path, facts in now.items() if before.get(path) != facts})


def contents_of(
    records: Iterable[RankRecord], before: Mapping[str, tuple[int, int]], scratch: Path
) -> FileDigests:
    """Of the files of tensors among them."""
    paths = [path for path in changed_files(records, before, scratch) if _is_compared(Path(path))]
    return FileDigests({p: xxhash.xxh3_64_hexdigest(Path(p).read_bytes()) for p in paths})


def _is_compared(path: Path) -> bool:
    return path.suffix in OF_TENSORS and path.stat().st_size <= LARGEST


MOST_STOPS = 5
"""Disturbances of one rehearsal."""


@dataclass(frozen=True)
class Disturbance:
    """In `step` the program is asked to stop, or killed; `what` says what that step is."""

    step: int
    kills: bool
    what: str

    @property
    def words(self) -> str:
        """The disturbance in words."""
        how = f"killed in step {self.step}" if self.kills else f"stopped after step {self.step}"
        return f"{how} ({self.what})" if self.what else how


def plan(record: RankRecord) -> list[Disturbance]:
    """The disturbances of one run, in their order; the first is a stop, one at least is a kill.

    A stop falls on a boundary, a kill into the step after one. Raises `ValueError` if there are too
    few steps.
    """
    first, last = record.first + 1, record.last - 2
    if last < first:
        raise ValueError("too few steps")
    marks = {step: what for step, what in sorted(boundaries(record).items()) if step <= last}
    if len(marks) < 2:
        for step in (first + (last - first) // 3, first + 2 * (last - first) // 3):
            marks.setdefault(step, "")
    chosen: list[Disturbance] = []
    for step, what in sorted(marks.items()):
        kills = len(chosen) % 2 == 1
        at = step + 1 if kills else step
        if chosen and at <= chosen[-1].step:
            continue
        words = f"after {_article(what)}" if kills and what else what
        chosen.append(Disturbance(min(at, record.last - 1), kills, words))
    if len(chosen) == 1:
        chosen.append(Disturbance(min(chosen[0].step + 2, record.last), kills=True, what=""))
    return _spread(chosen)


def boundaries(record: RankRecord) -> dict[int, str]:
    """The first and the last step of each kind after which something else than a step comes."""
    last = record.last
    found = {
        "an epoch ends": epoch_ends(record),
        "a save": record.saved,
        "an evaluation": _if_rare([s for s, seen in record.evaluations.items() if seen], last),
    }
    marks: dict[int, str] = {}
    for what, steps in found.items():
        inner = [step for step in steps if record.first < step < last - 1]
        for step in {*inner[:1], *inner[-1:]}:
            marks[step] = f"{marks[step]}, {what}" if step in marks else what
    return marks


def epoch_ends(record: RankRecord) -> list[int]:
    """The steps after which samples come again."""
    seen: set[str] = set()
    ends = []
    for step, done in sorted(record.done.items()):
        if seen.intersection(done.samples):
            ends.append(step - 1)
            seen.clear()
        seen.update(done.samples)
    return _if_rare(ends, record.last)


def _if_rare(steps: Sequence[int], last: int) -> list[int]:
    """What comes after every second step or more often is no boundary."""
    return list(steps) if len(steps) * 2 <= last else []


def _article(what: str) -> str:
    return what.replace("an epoch ends", "the end of an epoch")


def _spread(chosen: list[Disturbance]) -> list[Disturbance]:
    """At most `MOST`, the first and the last among them, stops and kills in turns."""
    if len(chosen) <= MOST_STOPS:
        return chosen
    return [*chosen[: MOST_STOPS - 1], chosen[-1]]


@dataclass(frozen=True)
class ObservedStart:
    """One start of the program, and what its ranks have seen."""

    part: RehearsalPart
    records: tuple[RankRecord, ...]
    codes: tuple[int, ...]
    folder: Path

    @property
    def first(self) -> int:
        """The first step that it made."""
        return self.records[0].first

    @property
    def last(self) -> int:
        """The last step that it has done."""
        return self.records[0].last

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise than it was to."""
        expected = {0, int(ExitCode.STOPPED)}
        return not self.part.kills and not expected.issuperset(self.codes)

    def said(self) -> list[str]:
        """What the ranks have printed, rank after rank."""
        outputs = sorted(self.folder.glob("rank-*.out"))
        return [
            line for path in outputs for line in path.read_text("utf-8", "replace").splitlines()
        ]


@dataclass
class RehearsalRecord:
    """Everything that a rehearsal has seen."""

    undisturbed: ObservedStart
    disturbances: list[Disturbance] = field(default_factory=list)
    starts: list[ObservedStart] = field(default_factory=list)
    """One for each disturbance, which ends it, and the last, which goes on to the end."""
    again: ObservedStart | None = None
    """A second undisturbed run, if the first was not repeated before any disturbance."""
    elsewhere: ObservedStart | None = None
    """The start on another number of ranks, after the first stop."""
    contents: tuple[FileDigests, FileDigests] = (FileDigests(), FileDigests())
    """The files of tensors that the program wrote elsewhere: undisturbed, and at the end."""


@dataclass(frozen=True)
class Rehearsal:
    """A program to be rehearsed for `steps` steps on `size` ranks, in the folder `scratch`."""

    command: Sequence[str]
    steps: int
    size: int
    scratch: Path
    stage: Stage
    tell: Callable[[str], None]

    def run(self) -> RehearsalRecord:
        """Play all parts. Raises `UsageError` if the program makes no steps that can be seen."""
        before = listing(Path.cwd(), self.scratch)
        first = self._run_start("undisturbed", self.steps)
        seen = RehearsalRecord(first)
        if first.failed:
            return seen
        self._check(first)
        seen.disturbances = plan(first.records[0])
        written = contents_of(first.records, before, self.scratch)
        self._disturb(seen)
        if seen.starts[-1].failed:
            return seen
        seen.contents = written, contents_of(first.records, before, self.scratch)
        if self._differs_by_itself(seen):
            self.tell("it differs before any disturbance: once more undisturbed")
            seen.again = self._run_start("again", self.steps)
        return seen

    def _disturb(self, seen: RehearsalRecord) -> None:
        """One run that goes through all disturbances."""
        for number, disturbance in enumerate([*seen.disturbances, None], 1):
            at = self.steps if disturbance is None else disturbance.step
            kills = disturbance is not None and disturbance.kills
            self.tell(f"start {number}: {disturbance.words if disturbance else 'to the end'}")
            start = self._run_start(f"start-{number}", at, kills=kills, run="disturbed", other=True)
            seen.starts.append(start)
            if start.failed:
                return
            if number == 1 and self.size > 1:
                self._resume_on_half_the_ranks(seen)

    def _resume_on_half_the_ranks(self, seen: RehearsalRecord) -> None:
        """After the first stop, from a copy of its run, on half as many ranks."""
        shutil.copytree(self.scratch / "disturbed", self.scratch / "elsewhere", symlinks=True)
        size = self.size // 2
        self.tell(f"start 2, as well on {size} of {self.size} ranks")
        smaller = replace(self, size=size)
        seen.elsewhere = smaller._run_start("elsewhere-2", self.steps, run="elsewhere")

    def _run_start(
        self, name: str, at: int, kills: bool = False, run: str = "", other: bool = False
    ) -> ObservedStart:
        """Start the program until it is disturbed in step `at`, or is complete."""
        folder = self.scratch / f"part-{name}"
        folder.mkdir()
        part = RehearsalPart(
            str(folder), str(self.scratch / (run or name)), at, kills, str(Path.cwd())
        )
        outputs = [folder / f"rank-{rank}.out" for rank in range(self.size)]
        variables = {**part.environment(), "MLFLOW_TRACKING_URI": f"file:{self.scratch}/mlflow"}
        codes = self.stage.run(self.command, variables, outputs, other)
        records = [read_record(folder / f"rank-{rank}.jsonl") for rank in range(self.size)]
        return ObservedStart(part, tuple(records), tuple(codes), folder)

    def _check(self, first: ObservedStart) -> None:
        if not first.records[0].done:
            raise UsageError(
                "rehearse: the program ended without a step that can be seen: it needs "
                "survive(...) or one of kempner's integrations (docs/own_loop.md)"
            )
        if first.last < 5:
            raise UsageError(
                f"rehearse: the program ended after {first.last} steps: at least 5 are needed"
            )

    def _differs_by_itself(self, seen: RehearsalRecord) -> bool:
        from kempner.rehearse.compare import differences

        return bool(differences(seen.undisturbed.records, seen.starts[0].records))
