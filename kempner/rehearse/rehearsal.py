"""Runs a program undisturbed, then with stops and kills, and keeps what was seen."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kempner.rehearse.files import Contents, contents_of, listing
from kempner.rehearse.plan import Disturbance, plan
from kempner.rehearse.records import Record, read_record
from kempner.rehearse.stage import Stage
from kempner.run.control.rehearsal import Part
from kempner.run.process.exit_codes import ExitCode, UsageError


@dataclass(frozen=True)
class Played:
    """One start of the program, and what its ranks have seen."""

    part: Part
    records: tuple[Record, ...]
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
class Seen:
    """Everything that a rehearsal has seen."""

    undisturbed: Played
    disturbances: list[Disturbance] = field(default_factory=list)
    starts: list[Played] = field(default_factory=list)
    """One for each disturbance, which ends it, and the last, which goes on to the end."""
    again: Played | None = None
    """A second undisturbed run, if the first was not repeated before any disturbance."""
    elsewhere: Played | None = None
    """The start on another number of ranks, after the first stop."""
    contents: tuple[Contents, Contents] = (Contents(), Contents())
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

    def run(self) -> Seen:
        """Play all parts. Raises `UsageError` if the program makes no steps that can be seen."""
        before = listing(Path.cwd(), self.scratch)
        first = self._play("undisturbed", self.steps)
        seen = Seen(first)
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
            seen.again = self._play("again", self.steps)
        return seen

    def _disturb(self, seen: Seen) -> None:
        """One run that goes through all disturbances."""
        for number, disturbance in enumerate([*seen.disturbances, None], 1):
            at = self.steps if disturbance is None else disturbance.step
            kills = disturbance is not None and disturbance.kills
            self.tell(f"start {number}: {disturbance.words if disturbance else 'to the end'}")
            start = self._play(f"start-{number}", at, kills=kills, run="disturbed", other=True)
            seen.starts.append(start)
            if start.failed:
                return
            if number == 1 and self.size > 1:
                self._go_elsewhere(seen)

    def _go_elsewhere(self, seen: Seen) -> None:
        """After the first stop, from a copy of its run, on half as many ranks."""
        shutil.copytree(self.scratch / "disturbed", self.scratch / "elsewhere", symlinks=True)
        size = self.size // 2
        self.tell(f"start 2, as well on {size} of {self.size} ranks")
        smaller = replace(self, size=size)
        seen.elsewhere = smaller._play("elsewhere-2", self.steps, run="elsewhere")

    def _play(
        self, name: str, at: int, kills: bool = False, run: str = "", other: bool = False
    ) -> Played:
        """Start the program until it is disturbed in step `at`, or is complete."""
        folder = self.scratch / f"part-{name}"
        folder.mkdir()
        part = Part(str(folder), str(self.scratch / (run or name)), at, kills, str(Path.cwd()))
        outputs = [folder / f"rank-{rank}.out" for rank in range(self.size)]
        variables = {**part.environment(), "MLFLOW_TRACKING_URI": f"file:{self.scratch}/mlflow"}
        codes = self.stage.run(self.command, variables, outputs, other)
        records = [read_record(folder / f"rank-{rank}.jsonl") for rank in range(self.size)]
        return Played(part, tuple(records), tuple(codes), folder)

    def _check(self, first: Played) -> None:
        if not first.records[0].done:
            raise UsageError(
                "rehearse: the program ended without a step that can be seen: it needs "
                "survive(...) or one of kempner's integrations (docs/own_loop.md)"
            )
        if first.last < 5:
            raise UsageError(
                f"rehearse: the program ended after {first.last} steps: at least 5 are needed"
            )

    def _differs_by_itself(self, seen: Seen) -> bool:
        from kempner.rehearse.compare import differences

        return bool(differences(seen.undisturbed.records, seen.starts[0].records))
