"""Ranks that fail are started again, from the last commit, as long as that leads somewhere."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli
import warm
from harness import KEMPNER, Job, Run, wait_until

from kempner.run.record.ledger import read_lines


def kill_once_ready(run: Run, job: Job, attempt: int, rank: int) -> None:
    """SIGKILL a rank of an attempt before it has made a step that is saved."""
    os.kill(run.ready_pid(attempt, rank, job), signal.SIGKILL)


@pytest.mark.drill
def test_a_run_whose_ranks_die_again_and_again_is_given_up(run: Run) -> None:
    """Of `make check` the next one is a part: there they die twice, and always at the same step."""
    job = run.supervise(
        2, "--supervise.max_restarts_without_progress=2", "--checkpoint.interval=1000"
    )
    for attempt in (1, 2, 3):
        kill_once_ready(run, job, attempt, attempt % 2)
    assert job.wait() == 1
    assert "3 attempts saved nothing new: giving up" in job.output()
    assert len(run.events("restarting")) == 2
    (given_up,) = run.events("gave_up")
    assert given_up["attempt"] == 3
    assert run.attempt() == 3


def always_at_step_30(attempts: int) -> str:
    """Rank 1 raises an exception in step 30, in each of the first attempts."""
    return "; ".join(f"crash rank 1 at step 30 attempt {n + 1}" for n in range(attempts))


def test_a_run_that_always_dies_at_the_same_step_is_given_up_for_good(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    options = ("--supervise.max_restarts_without_progress=1", "--checkpoint.interval=1000")
    job = run.supervise(2, *options, KEMPNER_FAULTS=always_at_step_30(2))
    assert job.wait() == 1
    (gave_up,) = run.events("gave_up")
    assert (gave_up["code"], gave_up["rank"], gave_up["step"]) == (1, 1, 30)
    assert gave_up["node"] == platform.node()
    assert gave_up["raised"].startswith("RuntimeError: injected fault")
    assert str(run.record.log(2, 1)) in gave_up["see"]
    for words in (
        "2 attempts saved nothing new",
        "at step 30",
        gave_up["raised"],
        str(run.record.gave_up),
    ):
        assert words in job.output()
    assert tomli.loads(run.record.gave_up.read_text())["reason"] in job.output()

    again = run.supervise(2, *options)
    assert again.wait() == 1
    _, sentence = again.output().splitlines()
    assert f"{run.record.gave_up} says why" in sentence
    assert run.attempt() == 2
    _, status = warm.complete(*KEMPNER, "status", run.record.path)
    assert f"delete {run.record.gave_up}, and start again" in status
    assert gave_up["raised"] in status

    run.record.gave_up.unlink()  # a person has mended it
    run.complete(2, *options)
    assert run.steps() == undisturbed(2, "--checkpoint.keep_last=9").steps()


@pytest.mark.drill
def test_a_run_that_saves_something_each_time_is_never_given_up(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    """`make check` has it of six kills: tests/drills/runs/test_kills_and_restarts.py."""
    options = ("--supervise.max_restarts_without_progress=1", "--train.max_steps=60")
    job = run.supervise(1, *options)
    for attempt, commits in ((1, 1), (2, 2), (3, 3)):
        saved = lambda n=commits: len(run.events("checkpoint_committed")) >= n  # noqa: E731
        wait_until(saved, f"commit {commits}", job=job)
        os.kill(run.ready_pid(attempt, 0, job), signal.SIGKILL)
    assert job.wait(120) == 0, job.output()
    assert run.attempt() == 4
    assert run.steps() == undisturbed(1, "--train.max_steps=60").steps()


def test_what_a_restart_cannot_mend_is_not_tried_again(run: Run, tmp_path: Path) -> None:
    """Nor does what was never started, or never made a step, keep the corrected command away."""
    job = run.supervise(1, f"--data.dataset_path={tmp_path}/nowhere")
    assert job.wait() == 65
    _, sentence = job.output().splitlines()
    assert sentence.startswith(f"kempner: data.dataset_path={tmp_path}/nowhere: ")
    assert not run.record.path.exists()

    once = "--supervise.max_restarts_without_progress=0"
    job = run.supervise(1, once, KEMPNER_FAULTS="crash rank 0 at step 1")
    assert job.wait() == 1
    assert "saved nothing new: giving up" in job.output()
    assert (run.attempt(), run.record.gave_up.exists()) == (1, False)
    run.complete(1)

    job = run.supervise(1, "--train.seed=5", "--train.max_steps=50")
    assert job.wait() == 65
    assert "--run.name=NAME; changed since: train.max_steps 40 -> 50, train.seed 0 -> 5" in (
        job.output()
    )
    assert (run.attempt(), run.record.gave_up.exists()) == (2, False)

    run.complete(1, "--optimizer.lr=0.001")
    resumed = "resumed at step 40, sample 320; changed since: optimizer.lr 0.003 -> 0.001"
    assert resumed in run.jobs[-1].output()


def test_a_wrong_configuration_leaves_no_mark(run: Run) -> None:
    run.config.write_text(run.config.read_text().replace("threads = 1\n", ""))
    job = run.supervise(2, OMP_NUM_THREADS="none")
    assert job.wait() == 2
    assert not run.record.gave_up.exists()


@pytest.mark.drill
def test_a_stop_during_a_restart_is_a_stop(run: Run) -> None:
    """`make check` has it in a simulated world: tests/drills/runs/test_simulated_world.py."""
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
