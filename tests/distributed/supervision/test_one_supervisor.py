"""A run has one supervisor: a second one leaves, a dead one is replaced, a replaced one leaves."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from harness import Run, wait_until
from patience import slowed

from kempner.run.record.lease import RELEASED, look
from kempner.run.record.ledger import read_lines

TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    *("-m", "kempner", "train"),
]
LONG = "--train.max_steps=60"
SLOW = "slow rank 0 by 5 from step 2"
"""For there to be steps left when the third supervisor comes."""


def test_a_second_start_says_who_is_there_and_changes_nothing(run: Run) -> None:
    job = run.supervise(1, "--train.max_steps=100000")
    run.reach(3, job)
    second = run.supervise(1, "--train.max_steps=100000")
    assert second.wait() == 2
    *_, sentence = second.output().splitlines()
    assert f"this run has a supervisor: process {job.process.pid} on " in sentence
    unsupervised = run.start(TORCHRUN, "--train.max_steps=100000")
    assert unsupervised.wait() == 1
    said = f"kempner: this run has a supervisor: process {job.process.pid} on "
    assert unsupervised.output().count(said) == 2  # no rank begins
    assert "exitcode  : 2 " in unsupervised.output()
    run.reach(max(run.steps()) + 5, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert run.attempt() == 1


def test_ranks_without_a_supervisor_own_their_run_as_one_would(run: Run) -> None:
    job = run.train("--train.max_steps=100000")
    run.reach(3, job)
    second = run.supervise(1, "--train.max_steps=100000")
    assert second.wait() == 2
    assert f"this run has a supervisor: process {job.process.pid} on " in second.output()
    job.signal()
    assert job.wait() == 75, job.output()
    seen = look(run.record.supervisors)
    assert seen is not None
    assert seen.beat == RELEASED


def test_a_killed_one_is_replaced_at_once_and_a_sleeping_one_finds_itself_replaced(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    options = (LONG, f"--supervise.lease={slowed(2)}")
    killed = run.supervise(1, LONG, "--supervise.lease=100000", KEMPNER_FAULTS=SLOW)
    run.reach(12, killed)
    killed.signal(signal.SIGKILL)
    killed.process.wait()

    sleeping = run.supervise(1, *options, KEMPNER_FAULTS=SLOW)  # or this would wait for a day
    run.reach(max(run.steps()) + 12, sleeping)
    assert "is dead" in sleeping.output()
    sleeping.signal(signal.SIGSTOP)

    awake = run.supervise(1, *options, KEMPNER_FAULTS=SLOW)
    wait_until(lambda: run.attempt() == 3, "the third to take over", job=awake)
    assert f"did not renew its lease for {slowed(2):g} s" in awake.output()
    sleeping.signal(signal.SIGCONT)
    assert sleeping.wait() == 74
    assert "this run was taken over by process" in sleeping.output()
    assert awake.wait(120) == 0, awake.output()

    # It may hand on what its ranks had told it before; it concludes nothing of its own.
    told = [e for e in read_lines(run.record.ledger) if e["attempt"] == 2]
    own = {"attempt_ended", "attempt_failed", "restarting", "gave_up", "stop_requested"}
    assert not own & {e["event"] for e in told}
    assert run.steps() == undisturbed(1, LONG).steps()
