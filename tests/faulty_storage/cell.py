"""Plays one cell of the matrix: a tiny run on the faulty file system, and what must hold of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import warm
from drilling import SMALLEST_MODEL
from harness import KEMPNER, Job, Run, end_jobs
from patience import scaled

from faulty_storage.matrix import (
    CHANCE,
    LOAD,
    LONG,
    REQUEUE,
    RUN,
    SAVE,
    SHORT,
    START,
    STEP,
    STOP,
    WHERES,
    Cell,
)
from faulty_storage.mount import Mount, mounted
from faulty_storage.rules import DELAY, HANG, MARK, Match, Rule

STEPS, INTERVAL, STOP_AFTER = 40, 20, 6
PROBABILITY = 0.3
PATIENCE = 150.0
"""Seconds that a launch may take beside the fault: several starts of ranks, on a busy machine."""

OVERRIDES = (
    *SMALLEST_MODEL,
    "--train.global_batch_size=4",
    "--train.micro_batch_size=2",
    f"--train.max_steps={STEPS}",
    f"--checkpoint.interval={INTERVAL}",
    "--data.num_shards_per_rank=1",  # token files are opened again and again
    "--supervise.lease=3",  # renewed five times a second, so that every moment meets it
)

TALKATIVE = "; ".join(f"slow rank 0 by 1.1 from step 1 attempt {n}" for n in range(1, 9))
"""Lets a rank log a warning in every step, so that standard error and logs are always in use."""

SLOW = Rule("slow", DELAY, Match(("tokens/*.tokens",), ("read",)), each=0.03)
"""Makes a step take a tenth of a second: what happens once in a while happens in every run."""

FIRST_STEP = Rule("a step", MARK, Match((f"{RUN}/metrics.jsonl",), ("write",)))
FIRST_SAVE = Rule("a save", MARK, Match((f"{RUN}/checkpoints/.step-*",), ("mkdir",)))
"""They mark where one moment ends and another one begins."""

AFTER: Mapping[str, tuple[Match, int]] = {
    LOAD: (Match((f"{RUN}/checkpoints/step-*/manifest.json",), ("open",)), 1),
    STEP: (FIRST_STEP.match, 3),
    SAVE: (FIRST_SAVE.match, 1),
}
"""What the file system sees at the beginning of a moment, and how often."""

BEFORE = {START: FIRST_STEP, LOAD: FIRST_STEP, STEP: FIRST_SAVE}
"""What ends a moment; the others end with the process."""


@dataclass(frozen=True)
class Seconds:
    """How long faults last."""

    by_how: Mapping[str, float]

    def rule(self, cell: Cell) -> Rule:
        """The cell as a rule for the file system."""
        after, count = AFTER.get(cell.when, (None, 1))
        by_chance = cell.how == CHANCE
        return Rule(
            str(cell),
            cell.what,
            Match(WHERES[cell.where].paths, cell.operations),
            seconds=self.by_how[cell.how],
            probability=PROBABILITY if by_chance else 1.0,
            cut=not by_chance,
            each=1.0 if by_chance and cell.what == HANG else None,
            after=after,
            count=count,
        )


IN_DRILLS = Seconds({SHORT: 10.0, LONG: 90.0, CHANCE: 10.0})
IN_TESTS = Seconds({SHORT: 2.0, LONG: 3.0, CHANCE: 2.0})


@dataclass
class FaultyRun(Run):
    """A run that knows its files through the mount; the test looks at them beside it."""

    mount: Path = Path()

    def launch(self, nproc: int) -> Job:
        """Start `kempner supervise`, with standard output and error on the mount."""
        command = [*KEMPNER, "supervise", "--nproc", str(nproc), str(self.config), *self.overrides]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "KEMPNER_FAULTS": TALKATIVE}
        with open(self._told("stderr"), "ab") as err:
            process = warm.start(command, environ, err, spare=True, stdout=self._told("stdout"))
        self.jobs.append(Job(process, self.folder / f"stderr-{len(self.jobs)}"))
        return self.jobs[-1]

    def _told(self, name: str) -> Path:
        return self.mount / "a" / f"{name}-{len(self.jobs)}"

    @classmethod
    def make(cls, mount: Mount, corpus: Path, stopped: FaultyRun | None) -> FaultyRun:
        """A run on the mount, at its beginning, or where another one was stopped."""
        shutil.copytree(corpus, mount.folder / "tokens")
        run = cls(mount.folder / "a", mount.path / "tokens", mount=mount.path)
        run.overrides = [f'--run.dir="{mount.path}/a/runs"', *OVERRIDES]
        if stopped is not None:
            run.go_on_from(stopped)
            # It is the same run, with the same data, that goes on: at its place, not at another.
            config = run.record.config
            config.write_text(config.read_text().replace(str(stopped.mount), str(run.mount)))
        for rule in (SLOW, FIRST_STEP, FIRST_SAVE):
            mount.add(rule)
        return run


def stopped_run(folder: Path, corpus: Path) -> FaultyRun:
    """The run that `make_stopped_run` has left in `folder`."""
    return FaultyRun(folder / "a", corpus, mount=folder / "storage" / "mount")


def make_stopped_run(folder: Path, corpus: Path, world: int) -> None:
    """Make, in `folder`, a run that was stopped after two commits."""
    with mounted(folder / "storage") as mount:
        run = FaultyRun.make(mount, corpus, None)
        job = run.launch(world)
        run.reach(INTERVAL + 2, job)
        job.signal()
        assert job.wait(PATIENCE) == 75, job.output()
        shutil.copytree(mount.folder / "a", folder / "a", symlinks=True)


@dataclass
class Outcome:
    """What became of a cell; `wrong` is what should not be, a phrase each."""

    seconds: float = 0.0
    faults: int = 0
    attempts: int = 0
    codes: list[int | None] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Player:
    """Plays cells, each with a mount of its own in a folder of its own."""

    corpus: Path
    stopped: Callable[[int], FaultyRun]
    undisturbed: Callable[[int], Run]
    lasts: Seconds

    def play(self, cell: Cell, world: int, place: Path) -> Outcome:
        outcome = Outcome()
        stopped = self.stopped(world) if cell.when in (LOAD, REQUEUE) else None
        expected = self.undisturbed(world)
        with mounted(place) as mount:
            run = FaultyRun.make(mount, self.corpus, stopped)
            began = time.time()
            try:
                over = self._meet(cell, world, mount, run, outcome)
                outcome.wrong += wrong_at_the_end(run, expected)
            finally:
                mount.clear()
                end_jobs(run)
            outcome.seconds = round(time.time() - began, 1)
            outcome.attempts = run.attempt()
            times = [fault["time"] for fault in mount.faults(str(cell))]
            outcome.faults = len(times)
            if cell.when in BEFORE:
                over = min([over, *mount.marks(BEFORE[cell.when].name)])
            if not times or times[0] > over:
                outcome.wrong.append("the fault did not happen then")
        outcome.wrong = [" ".join(one.replace(f"{place}/", "").split()) for one in outcome.wrong]
        return outcome

    def _meet(
        self, cell: Cell, world: int, mount: Mount, run: FaultyRun, outcome: Outcome
    ) -> float:
        """Run through the fault to the end; when the launch that met it was over."""
        rule = self.lasts.rule(cell)
        patience = scaled(PATIENCE + (rule.seconds or 0.0))
        if cell.when != STOP:
            mount.add(rule)
        job = run.launch(world)
        if cell.when == STOP:
            run.reach(STOP_AFTER, job)
            mount.add(rule)
            job.signal()
            outcome.wrong += self._end(run, job, 75, patience, outcome)
            over = time.time()
            outcome.wrong += wrong_after_a_stop(run)
            mount.clear(rule.name)
            job = run.launch(world)
            outcome.wrong += self._end(run, job, 0, patience, outcome)
            return over
        outcome.wrong += self._end(run, job, 0, patience, outcome)
        return time.time()

    def _end(
        self, run: Run, job: Job, expected: int, patience: float, outcome: Outcome
    ) -> list[str]:
        """What is wrong with the end of a launch."""
        try:
            outcome.codes.append(job.process.wait(patience))
        except subprocess.TimeoutExpired:
            outcome.codes.append(None)
            end_jobs(run)
            return [f"not over after {patience:g} s"]
        if outcome.codes[-1] == expected:
            return []
        lines = [line.strip() for line in job.output().splitlines() if "slow rank" not in line]
        said = " / ".join([line for line in lines if line.strip(" ^~")][-3:])
        return [f"exit code {outcome.codes[-1]} instead of {expected}: {said[-400:]}"]


def wrong_after_a_stop(run: Run) -> list[str]:
    """What should not be when a run was stopped with all the time in the world."""
    done, saved = max(run.samples(), default=0), max(run.committed(), default=0)
    return [f"stopped after step {done}, but saved {saved}"] if done != saved else []


def wrong_at_the_end(run: Run, expected: Run) -> list[str]:
    """What should not be when a run has completed."""
    taken = run.taken()
    aside = [path.name for path in run.checkpoints.glob("*damaged*")]
    wrong = [f"{name} set aside" for name in aside]
    if run.record.gave_up.exists():
        wrong.append(f"given up: {run.record.gave_up.read_text()[:400]}")
    if sorted(taken) != list(range(len(taken))) or run.samples() != expected.samples():
        wrong.append("other samples than undisturbed")
    if run.weights() != expected.weights():
        wrong.append("other weights than undisturbed")
    return wrong
