"""SIGKILL before each distinct system call of a save: of one rank, or of all.

Distinct is a call by its name, the rank that makes it, and what it works on. Each attempt of one
long run is killed at the next of them, so that every start is also the resume after a kill.
`make check` kills ranks in the parts of a save (tests/drills/runs/test_kills_and_restarts.py), and
looks at what is left on the disk before and after each call (test_power_loss.py).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from random import Random

import pytest
from drill import READY, SMALLEST, Moment, Saving, attach, ranks, reported
from drilling import ALL, SEED, note
from harness import Run
from promises import broken, resumable
from tracer import Call, supported

from kempner.checkpoint.format.names import CheckpointFolder

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(9000 if ALL else 200),
    pytest.mark.skipif(not supported(), reason="the tracer knows the system calls of x86_64 only"),
]

WORLD = 2
KILLS = None if ALL else 2
STEPS = 800 if ALL else 40
OFTEN = ("--checkpoint.interval=2", *SMALLEST)
LONG = (f"--train.max_steps={STEPS}", *OFTEN)
PATIENCE = 5
"""Saves after which a moment that has not come is given up: not every save waits for a lock."""

CHANGES = {"mkdir", "openat", "fallocate", "pwrite64", "write", "sync_file_range", "fsync"}
CHANGES |= {"rename", "symlink", "unlink", "unlinkat", "rmdir"}


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[Moment]:
    """Every distinct call of the ranks in four saves, two of which let an older one go."""
    run, found = Run(tmp_path_factory.mktemp("enumerated") / "run", corpus), set[Moment]()
    saving, committed = Saving(run), set[int]()

    def see(call: Call, rank: int) -> None:
        committed.update(filter(None, [reported(call, run)]))
        if len(committed) < 5 and (moment := saving.moment(call, rank)):
            found.add(moment)

    job = run.supervise(WORLD, "--train.max_steps=10", *OFTEN)
    tracer = attach(run, job, WORLD, entered=see)
    assert job.wait(120) == 0, job.output()
    tracer.join()
    return sorted(found)


def kill_at(run: Run, moment: Moment, all_ranks: bool) -> bool:
    """Start the run and kill one rank or all when it comes to `moment`; False if it did not."""
    job = run.supervise(WORLD, *LONG, "--supervise.max_restarts_without_progress=0")
    pids = ranks(run, job, WORLD, READY)
    saving, committed, killed = Saving(run), set[int](), list[bool]()

    def kill(call: Call, rank: int) -> None:
        committed.update(filter(None, [reported(call, run)]))
        reached = saving.moment(call, rank) == moment
        if not killed and (reached or len(committed) == PATIENCE):
            killed.append(reached)
            for pid in pids if all_ranks else [call.pid]:
                os.kill(pid, signal.SIGKILL)

    tracer = attach(run, job, WORLD, entered=kill)
    assert job.wait(120) == 1, job.output()
    tracer.join()
    run.record.gave_up.unlink()  # what is to be mended was us
    return killed[0]


def test_a_kill_before_any_call_of_a_save_costs_nothing_that_was_committed(
    run: Run, reference: Run, moments: list[Moment]
) -> None:
    reference.complete(WORLD, *LONG)
    plan = [(moment, False) for moment in moments]
    plan += [(moment, True) for moment in moments if moment.kind and moment.name in CHANGES]
    Random(SEED).shuffle(plan)
    reached, expected = 0, list[int]()
    for moment, all_ranks in plan[:KILLS]:
        came = kill_at(run, moment, all_ranks)
        reached += came
        said = [event["step"] for event in run.events("checkpoint_committed")]
        assert not broken(run.checkpoints, said[-1] if said else None), (moment, all_ranks)
        best = resumable(CheckpointFolder(run.checkpoints))
        expected += [best] if best is not None else []
        note("kill", **vars(moment), everyone=all_ranks, came=came, resumable=best)
    run.complete(WORLD, *LONG)
    assert [event["step"] for event in run.events("resumed")] == expected
    assert run.steps() == reference.steps()
    assert [s for ids in run.samples().values() for s in ids] == list(range(2 * STEPS))
    note("kills", moments=len(moments), kills=len(plan[:KILLS]), reached=reached, steps_alike=STEPS)
    assert reached > 0.9 * len(plan[:KILLS])
