"""Ranks that fail are started again, from the last commit, as long as that leads somewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from harness import Job, Run, wait_until

from kempner.run.ledger import read_lines


def kill_once_ready(run: Run, job: Job, attempt: int, rank: int) -> None:
    """SIGKILL a rank of an attempt before it has made a step that is saved."""
    os.kill(run.ready_pid(attempt, rank, job), signal.SIGKILL)


def test_a_run_whose_ranks_die_again_and_again_is_given_up(run: Run) -> None:
    job = run.supervise(2, "--supervise.fruitless_restarts=2", "--checkpoint.interval=1000")
    for attempt in (1, 2, 3):
        kill_once_ready(run, job, attempt, attempt % 2)
    assert job.wait() == 1
    assert "3 attempts have saved nothing new: giving up" in job.output()
    assert len(run.events("restarting")) == 2
    (given_up,) = run.events("gave_up")
    assert given_up["attempt"] == 3
    assert run.attempt() == 3


def test_a_run_that_saves_something_each_time_is_never_given_up(run: Run, reference: Run) -> None:
    options = ("--supervise.fruitless_restarts=1", "--train.max_steps=60")
    job = run.supervise(2, *options)
    for attempt, commits in ((1, 1), (2, 2), (3, 3)):
        saved = lambda n=commits: len(run.events("checkpoint_committed")) >= n  # noqa: E731
        wait_until(saved, f"commit {commits}", job=job)
        os.kill(run.ready_pid(attempt, 0, job), signal.SIGKILL)
    assert job.wait(120) == 0, job.output()
    assert run.attempt() == 4
    reference.complete(2, *options)
    assert run.steps() == reference.steps()


def test_what_a_restart_cannot_mend_is_not_tried_again(run: Run, tmp_path: Path) -> None:
    run.config.write_text(run.config.read_text().replace(str(run.data), str(tmp_path / "nowhere")))
    job = run.supervise(2)
    assert job.wait() == 65
    assert "nowhere" in job.output()
    assert run.attempt() == 1


def test_a_stop_during_a_restart_is_a_stop(run: Run) -> None:
    job = run.supervise(2, "--train.max_steps=100000")
    wait_until(lambda: run.committed(), "a commit", job=job)
    os.kill(run.ready_pid(1, 1, job), signal.SIGKILL)
    wait_until(lambda: run.events("restarting"), "the restart", job=job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert max(run.committed()) == run.latest()
    log = list(read_lines(run.record.ledger))
    assert log[-1]["event"] == "attempt_ended"
    assert log[-1]["code"] == 75


def test_a_hang_is_noticed_named_and_healed(run: Run, reference: Run) -> None:
    options = ("--train.max_steps=60", "--checkpoint.interval=10")
    patience = ("--resilience.hang_floor=8.0", "--resilience.hang_factor=5.0")
    job = run.supervise(3, *options, *patience, "--train.global_batch_size=6")
    wait_until(lambda: run.committed(), "a commit", job=job)
    victim = run.ready_pid(1, 1, job)
    os.kill(victim, signal.SIGSTOP)
    assert job.wait(150) == 0, job.output()
    (hang,) = run.events("hang")
    assert hang["laggard"] == 1
    assert any(f"process {victim}: State: T (stopped)" in line for line in hang["processes"])
    for rank in (0, 2):  # those that can run say where they are: in a collective
        stacks = run.record.stacks(1, rank).read_text()
        assert "most recent call first" in stacks
    assert run.events("attempt_ended")[0]["code"] == 77
    reference.complete(3, *options, "--train.global_batch_size=6")
    assert run.steps() == reference.steps()
