"""Faults that are asked for happen, and are what they say."""

from __future__ import annotations

import signal

import psutil
import pytest
from harness import Run, drills, wait_until

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    ("fault", "status", "last_step"),
    [
        ("kill rank 0 at step 5", -signal.SIGKILL, 4),
        ("crash rank 0 at step 6 in eval", 1, 6),
        ("crash rank 0 in start", 1, 0),
        *drills(
            ("kill rank 0 at step 10 in save", -signal.SIGKILL, 10),
            ("kill rank 0 in load", -signal.SIGKILL, 0),
        ),
    ],
)
def test_a_rank_dies_where_it_was_asked_to(
    run: Run, fault: str, status: int, last_step: int
) -> None:
    evaluation = ("--eval.interval=6", f'--eval.dataset_path="{run.data}"', "--eval.max_batches=1")
    job = run.train(*evaluation, KEMPNER_FAULTS=fault)
    assert job.wait() == status, job.output()
    assert max(run.steps(), default=0) == last_step
    assert f"injecting fault (fault {fault}" in job.output()


@pytest.mark.parametrize("part", ["commit", *drills("stage", "write")])
def test_a_rank_dies_in_the_part_of_a_save_that_was_named(run: Run, part: str) -> None:
    job = run.train(KEMPNER_FAULTS=f"kill rank 0 at step 20 in {part}")
    assert job.wait() == -signal.SIGKILL, job.output()
    assert run.committed() == [10]
    files = sorted(path.name for path in run.checkpoints.glob(".step-00000020.*/*"))
    all_of_it = [".metadata", "__0_0.distcp", "index.json", "sums-00000.json"]
    written = {"stage": [], "write": ["__0_0.distcp"], "commit": all_of_it}
    assert files == written[part]


def test_a_save_that_raises_is_made_again(run: Run) -> None:
    faults = "crash rank 0 at step 10 in stage; crash rank 0 at step 20 in write"
    # In the background, ten steps might be made before the ranks know that the first one failed.
    waited_for = "--checkpoint.async_save=false"
    job = run.train("--train.max_steps=25", waited_for, KEMPNER_FAULTS=faults)
    assert job.wait() == 0, job.output()
    assert [e["step"] for e in run.events("checkpoint_failed")] == [10, 20]
    assert max(run.committed()) == 25


def test_a_rank_that_stops_itself_can_go_on_and_a_restart_is_healed(run: Run) -> None:
    fault = '--resilience.faults=["stop rank 0 at step 5", "hang rank 0 at step 9"]'
    job = run.train(fault, "--train.max_steps=12")
    rank = psutil.Process(job.process.pid)
    wait_until(lambda: rank.status() == psutil.STATUS_STOPPED, "the rank to stop", job=job)
    job.signal(signal.SIGCONT)
    wait_until(lambda: job.output().count("injecting fault") == 2, "the hang", job=job)
    assert max(run.steps()) == 8
    job.signal(signal.SIGKILL)
    job.wait()
    (told,) = run.events("faults_planned")
    assert told["faults"] == ["stop rank 0 at step 5", "hang rank 0 at step 9"]
    again = run.train(fault, "--train.max_steps=12")
    assert again.wait() == 0, again.output()
    assert "injecting fault" not in again.output()


@pytest.mark.parametrize("world", [2, *drills(1)])
def test_a_disk_that_is_full_for_one_save(run: Run, world: int) -> None:
    """Of several ranks the last one has it, and waits for the save; the others do not wait."""
    fault = f"disk_full rank {world - 1} at step 10"
    job = run.supervise(world, "--train.max_steps=25", KEMPNER_FAULTS=fault)
    assert job.wait() == 0, job.output()
    assert [e["step"] for e in run.events("checkpoint_failed")] == [10]
    assert [e["step"] for e in run.events("checkpoint_committed")] == [11, 20, 25]
    assert sorted(run.steps()) == list(range(1, 26))


def test_out_of_memory_is_told_in_one_sentence_and_the_next_attempt_is_healed(run: Run) -> None:
    job = run.supervise(2, KEMPNER_FAULTS="oom rank 1 at step 5")
    assert job.wait(100) == 0, job.output()
    assert "Traceback" not in job.output()
    ended, _ = run.events("attempt_ended")
    assert ended["code"] == 1
    assert ended["culprit"] == 1
    assert "out of memory in phase step after step 4: this rank has 0." in ended["reason"]
    assert "GiB are available" in ended["reason"]


def test_what_is_no_fault_ends_the_run_before_it_begins(run: Run) -> None:
    job = run.train('--resilience.faults=["kill rank 0 at noon"]')
    assert job.wait() == 2
    assert '"kill rank 0 at noon" is not a fault; write KIND rank R' in job.output()
    job = run.train(KEMPNER_FAULTS="nan rank 0 at step 1; melt rank 0 at step 2")
    assert job.wait() == 2
    assert 'KEMPNER_FAULTS: "melt rank 0 at step 2" is not a fault; the kinds are' in job.output()
    assert "Traceback" not in job.output()
