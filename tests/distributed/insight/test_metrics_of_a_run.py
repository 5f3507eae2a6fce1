"""Metrics of a real run: whole after a kill and a stop, and nothing is left of who exports them."""

from __future__ import annotations

import os
import signal

import psutil
from harness import Run, wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXPORTED = ("--metrics.tensorboard=true", "--metrics.wandb=ours")


def exporters(run: Run) -> list[psutil.Process]:
    """Those of this run that live."""
    ended = ["kempner", "metrics", str(run.record.path)]
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if (one.info["cmdline"] or [])[3:6] == ended]


def test_every_step_is_shown_once_though_its_exporter_was_stuck(run: Run) -> None:
    many = "--train.max_steps=100000"
    job = run.supervise(2, many, *EXPORTED, KEMPNER_FAULTS="kill rank 1 at step 13")
    run.reach(20, job)
    wait_until(lambda: len(exporters(run)) == 2, "both export", 60)
    for process in exporters(run):
        os.kill(process.pid, signal.SIGSTOP)
    run.reach(max(run.steps()) + 10, job)
    job.signal()
    assert job.wait() == 75
    assert exporters(run) == []

    last = max(run.steps()) + 20
    run.complete(2, f"--train.max_steps={last}", *EXPORTED)
    assert exporters(run) == []
    events = EventAccumulator(str(run.record.path / "tensorboard"), {"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [*range(1, last + 1)]
    assert (run.record.exports / "wandb" / "id").exists()
