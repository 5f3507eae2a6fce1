"""What the drills share: the smallest run, and traced runs."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import warm
from drilling import SMALLEST_MODEL
from harness import Job, Run, rank_processes, wait_until
from tracer import Call, Tracer

SMALLEST = (
    *SMALLEST_MODEL,
    "--train.global_batch_size=2",
    "--train.micro_batch_size=1",
    "--checkpoint.keep_last=2",
)
"""Overrides for a checkpoint of few bytes, and of as many files as any."""

READY = '"event": "ready"'
"""What a rank logs before its first step."""


def ranks(run: Run, job: Job, world: int, said: str) -> list[int]:
    """The process ids of an attempt's ranks, by rank, once their logs have the text `said`.

    They are not children of the test: a parent that waits would take the tracer's news.
    """
    attempt = len(run.jobs)

    def there() -> bool:
        logs = [run.record.log(attempt, rank) for rank in range(world)]
        return all(log.exists() and said in log.read_text() for log in logs)

    wait_until(there, f"the ranks' logs with {said!r}", job=job)
    # A job without a supervisor has a shell around its one rank.
    by_rank = rank_processes(job) or dict(enumerate(psutil.Process(job.process.pid).children()))
    return [by_rank[rank].pid for rank in range(world)]


def attach(
    run: Run,
    job: Job,
    world: int,
    entered: Callable[[Call, int], None] = lambda call, rank: None,
    left: Callable[[Call, int], None] = lambda call, rank: None,
    said: str = READY,
) -> Tracer:
    """Trace the ranks of a job that has just started; the callbacks are given the rank, too.

    It begins when their logs have the text `said`. What they import is over by `READY`: traced, it
    takes half a minute. The first save may have begun by then.
    """
    pids = ranks(run, job, world, said)
    return Tracer(
        pids,
        lambda call: entered(call, pids.index(call.pid)),
        lambda call: left(call, pids.index(call.pid)),
    )


@dataclass(frozen=True)
class Trace:
    """What the ranks asked of the system below their run's directory, before the first save on."""

    run: Run
    calls: list[tuple[Call, int]]
    """Each with its rank."""


def held(world: int) -> dict[str, str]:
    """For the environment of a run that is to be traced: its ranks wait for that, each stopped."""
    return {"KEMPNER_FAULTS": ";".join(f"stop rank {rank} in load" for rank in range(world))}


def trace(run: Run, job: Job, world: int) -> Trace:
    """Trace a run that was started `held` to its end, which must be a good one."""
    calls: list[tuple[Call, int]] = []
    here = str(run.record.path)

    def keep(call: Call, rank: int) -> None:
        if call.path.startswith(here):
            calls.append((call, rank))

    pids = ranks(run, job, world, "")
    stopped = lambda: all(psutil.Process(p).status() == psutil.STATUS_STOPPED for p in pids)  # noqa: E731
    wait_until(stopped, "the ranks to stand still", job=job)
    tracer = attach(run, job, world, left=keep, said="")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert job.wait(120) == 0, job.output()
    tracer.join()
    return Trace(run, calls)


def resume_each(config: Path, overrides: Sequence[str], runs: Iterable[str]) -> list[int]:
    """Resume in each of these runs, as `kempner train` does; the steps that were loaded."""
    program = Path(__file__).with_name("resume_each.py")
    code, printed = warm.complete(sys.executable, program, config, *overrides, "--", *runs)
    assert code == 0, printed
    return [int(line.split()[1]) for line in printed.splitlines() if line.startswith("loaded")]


def reported(call: Call, run: Run) -> int | None:
    """The step that rank 0 logs as committed with this call."""
    if call.name == "write" and call.path == str(run.record.log(len(run.jobs), 0)):
        event = json.loads(call.content)
        if event["event"] == "checkpoint committed":
            return int(event["step"])
    return None


_NAMES = (
    (r"\.step-\d+\.a0-[0-9a-f]+", "dying"),
    (r"\.step-\d+\.a\d+-[0-9a-f]+", "in progress"),
    (r"step-\d+", "committed"),
    (r"\.latest\.\S+", "next latest"),
)


def kind(path: str, run: Run) -> str:
    """What a path is to a save, without the numbers in it; "" if it is no part of one."""
    place, record = Path(path), run.record
    if place.is_relative_to(run.checkpoints):
        name = str(place.relative_to(run.checkpoints.parent))
        for pattern, meaning in _NAMES:
            name = re.sub(pattern, meaning, name)
        return re.sub(r"\d+", "N", name)
    if place.is_relative_to(record.attempts):
        return "CURRENT" if place.name == "CURRENT" else "log"
    return ""


@dataclass(frozen=True, order=True)
class Moment:
    """Before a rank's next call of this name on this kind of file ("" if on none of a save's)."""

    rank: int
    name: str
    kind: str


class Saving:
    """Tells a save's calls from the rest: it has threads of its own, known by what they create."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._threads: set[int] = set()

    def moment(self, call: Call, rank: int) -> Moment | None:
        """Which moment of a save this call is, or None if it is none."""
        if call.tid == call.pid:
            return None
        what = kind(call.path, self._run)
        if what and (call.creates or call.name in ("mkdir", "rename", "unlink")):
            self._threads.add(call.tid)
        return Moment(rank, call.name, what) if call.tid in self._threads else None
