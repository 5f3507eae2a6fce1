"""Stopped at any moment and started again, a run is the run that was never stopped."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from harness import KEMPNER, Job, Run, assert_named, drills, manifest, rank_processes, wait_until

from kempner.run.process.exit_codes import StopReason, reason_of_signal

pytestmark = pytest.mark.timeout(300)

STEPS = 60
LONG = f"--train.max_steps={STEPS}"


def assert_same(run: Run, reference: Run) -> None:
    """Every loss and gradient norm equal in every bit, every sample exactly once."""
    assert run.steps() == reference.steps()
    assert list(run.steps()) == list(range(1, STEPS + 1))
    taken = run.samples()
    assert list(taken) == list(range(1, STEPS + 1))
    assert [s for step in taken.values() for s in step] == list(range(8 * STEPS))


def expect_stop(run: Run, job: Job) -> int:
    """The job leaves with 75 and the checkpoint of the step that it stopped on; that step."""
    status = job.wait()
    if status == -signal.SIGTERM:  # before the interpreter could run a line of ours
        assert run.attempt() == 0
        return 0
    assert status == 75, job.output()
    done = max(run.steps(), default=0)
    if done:
        assert run.latest() == done
        assert manifest(run.checkpoints / "latest")["cursor"] == 8 * done
    assert not list(run.checkpoints.glob(".step-*"))
    return done


def stop_and_kill(run: Run, first: int, second: int, *options: str, at_first: str = "") -> None:
    """Train to the end on two ranks, stopped at the `first` step, and one killed at the `second`;
    the start before the stop has one option more."""
    job = run.supervise(2, *options, *filter(None, [at_first]))
    run.reach(first, job)
    job.signal()
    expect_stop(run, job)
    job = run.supervise(2, *options)
    run.reach(max(second, run.latest() + 1), job)
    rank_processes(job)[1].send_signal(signal.SIGKILL)
    assert job.wait() == 0, job.output()


@pytest.mark.parametrize(
    ("world", "workers", "data"),
    [
        (2, 1, "text"),
        (2, 2, "chats"),
        *drills((1, 0, "text"), (1, 2, "text"), (2, 0, "text"), (2, 2, "text"), (2, 0, "chats")),
    ],
)
def test_three_stops_change_nothing(
    run: Run,
    undisturbed: Callable[..., Run],
    chats: tuple[str, ...],
    world: int,
    workers: int,
    data: str,
) -> None:
    options = (LONG, *(chats if data == "chats" else ()))
    moments = sorted(random.Random(10 * world + workers).sample(range(2, 40), 3))
    loader = f"--data.num_dataloader_workers={workers}"
    stopped_on = []
    for moment, target in zip(moments, ("rank", "group", "supervisor"), strict=True):
        job = run.supervise(world, *options, loader)
        wait_until(lambda: run.attempt() == len(run.jobs), "the attempt", job=job)
        rank = run.ready_pid(run.attempt(), world - 1, job)
        run.reach(max(moment, *stopped_on, 1) if stopped_on else moment, job)
        if target == "rank":
            os.kill(rank, signal.SIGTERM)
        elif target == "group":
            os.killpg(rank, signal.SIGTERM)
        else:
            job.signal()
        stopped_on.append(expect_stop(run, job))
        assert_named(run.record, StopReason.SIGNAL, len(run.jobs), world, job.output())
    assert stopped_on == sorted(stopped_on)
    run.complete(world, *options, loader)
    assert [e["step"] for e in run.events("stopped")] == stopped_on
    assert_same(run, undisturbed(world, *options))


def started(run: Run, job: Job) -> object:
    """The supervisor exists."""
    return True


def launched(run: Run, job: Job) -> object:
    """Both ranks have a process, which has hardly begun."""
    return len(rank_processes(job)) == 2


def connected(run: Run, job: Job) -> object:
    """The ranks have found each other and opened their logs."""
    return run.record.log(1, 1).exists()


def first_step(run: Run, job: Job) -> object:
    """Built, and about to make the first step."""
    return run.record.log(1, 0).exists() and '"ready"' in run.record.log(1, 0).read_text()


def saving(run: Run, job: Job) -> object:
    """A save is under way."""
    return any(run.checkpoints.glob(".step-*"))


Moment = Callable[[Run, Job], object]


@pytest.mark.parametrize(
    "stops",
    [
        # One after the other in one run: the first two come before its first step.
        [(started, "supervisor"), (launched, "one rank"), (saving, "supervisor, twice")],
        *drills(
            [(launched, "supervisor")],
            [(connected, "one rank")],
            [(connected, "supervisor, twice")],
            [(first_step, "one rank")],
            [(first_step, "supervisor")],
            [(saving, "one rank")],
        ),
    ],
    ids=lambda stops: ", ".join(f"{moment.__name__} {target}" for moment, target in stops),
)
def test_a_stop_in_any_phase_leaves_nothing_half_done(
    run: Run, undisturbed: Callable[..., Run], stops: list[tuple[Moment, str]]
) -> None:
    for moment, target in stops:
        job = run.supervise(2, LONG, "--checkpoint.interval=1", "--checkpoint.keep_last=100")
        wait_until(lambda: moment(run, job), str(moment.__doc__), job=job)  # noqa: B023
        if target == "one rank":
            rank_processes(job)[1].send_signal(signal.SIGTERM)
        else:
            job.signal()
        if target == "supervisor, twice":
            job.signal()
        expect_stop(run, job)
    run.complete(2, LONG)
    assert_same(run, undisturbed(2, LONG))


def test_one_process_without_a_supervisor(run: Run, undisturbed: Callable[..., Run]) -> None:
    for step, number in ((11, signal.SIGTERM), (23, signal.SIGINT), (31, signal.SIGUSR1)):
        made = max(run.steps(), default=0)
        job = run.train(LONG)
        run.reach(max(step, made + 1), job)  # of its own: or it may not listen to signals yet
        job.signal(number)
        expect_stop(run, job)
        reason = reason_of_signal(number)
        assert_named(run.record, reason, run.attempt(), 1, job.output())
    assert run.train(LONG).wait() == 0
    assert_same(run, undisturbed(1, LONG))


@pytest.mark.cold("as people do it where there is torchrun")
def test_under_torchrun(run: Run, undisturbed: Callable[..., Run]) -> None:
    torchrun = [KEMPNER[0], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = run.start([*torchrun, "-m", "kempner", "train"], LONG)
    run.reach(5, job)
    os.kill(run.ready_pid(1, 1, job), signal.SIGTERM)
    assert job.wait() != 0  # torchrun has an exit code of its own
    assert run.latest() == max(run.steps())
    job = run.start([*torchrun, "-m", "kempner", "train"], LONG)
    assert job.wait(120) == 0, job.output()
    assert_same(run, undisturbed(2, LONG))


@pytest.mark.cold("stopped and started again, as people do it")
def test_a_second_ctrl_c_leaves_at_once_and_a_killed_supervisor_loses_nothing(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    job = run.supervise(2, LONG)
    run.reach(12, job)
    job.signal(signal.SIGINT)
    expect_stop(run, job)
    assert_named(run.record, StopReason.INTERRUPT, 1, 2, job.output())

    job = run.supervise(2, LONG)
    run.reach(max(run.steps()) + 2, job)
    ranks = [rank.pid for rank in rank_processes(job).values()]
    job.signal(signal.SIGINT)
    job.signal(signal.SIGINT)
    assert job.wait() in (130, 75)  # 75 if the ranks were faster than the second Ctrl-C
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "ranks to be gone")

    job = run.supervise(2, LONG)
    run.reach(max(run.steps()) + 5, job)
    ranks = [rank.pid for rank in rank_processes(job).values()]
    job.signal(signal.SIGKILL)
    job.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "ranks to leave")
    assert run.latest() == max(run.steps())
    assert_named(run.record, StopReason.SUPERVISOR_LOST, run.attempt(), 2, job.output())

    run.complete(2, LONG)
    assert_same(run, undisturbed(2, LONG))


@pytest.mark.drill
def test_a_killed_rank_costs_the_steps_since_the_last_commit(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    job = run.supervise(2, LONG)
    wait_until(lambda: run.committed(), "a commit", job=job)
    os.kill(run.ready_pid(1, 1, job), signal.SIGKILL)
    assert job.wait() == 0, job.output()
    (restarting,) = run.events("restarting")
    assert "rank 1 was killed by SIGKILL at step" in restarting["reason"]
    (resumed,) = run.events("resumed")
    assert (
        min(line["step"] for line in run.metrics() if line["attempt"] == 2) - 1 == resumed["step"]
    )
    assert resumed["step"] in (10, 20, 30, 40, 50)
    assert_same(run, undisturbed(2, LONG))


def test_a_completed_run_started_again_says_so_and_trains_nothing(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    run.go_on_from(undisturbed(1, LONG))
    before = run.steps()
    attempts = run.attempt()
    run.complete(1, LONG)
    assert run.steps() == before
    assert run.attempt() == attempts + 1
    assert run.latest() == STEPS


def test_a_stop_during_evaluation_is_noticed_and_the_evaluation_made_up_for(
    run: Run, reference: Run, corpus: Path
) -> None:
    evaluation = [
        "--train.max_steps=4",
        "--scheduler.warmup_steps=2",
        "--eval.interval=2",
        f'--eval.dataset_path="{corpus}"',
        "--eval.max_batches=40",
    ]
    reference.complete(1, *evaluation)
    job = run.train(*evaluation)
    run.reach(2, job)  # the next thing is the evaluation
    job.signal()
    expect_stop(run, job)
    run.complete(1, *evaluation)

    def evaluations(of: Run) -> dict[int, float]:
        from kempner.run.record.ledger import read_lines

        lines = read_lines(of.record.metrics)
        return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}

    assert evaluations(run) == evaluations(reference)
    assert sorted(evaluations(run)) == [2, 4]
    assert run.steps() == reference.steps()
