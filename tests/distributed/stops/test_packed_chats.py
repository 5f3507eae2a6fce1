"""Runs of packed chats through stops, a kill and other worlds: whole models, and adapters."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator

import pytest
from harness import Run, drills, rank_processes
from test_adapter_runs import begin
from test_stop_and_resume import LONG, STEPS, expect_stop

pytestmark = pytest.mark.timeout(600)

TROUBLE = {2: ("stop", "stop"), 3: ("stop", "kill", "stop"), 1: ("stop",)}
"""What befalls the run in each world, one after the other; a world's last stop ends its part."""

WORKERS = tuple(f"--data.num_dataloader_workers={count}" for count in (2, 0))


def suffer(run: Run, world: int, options: tuple[str, ...], moments: Iterator[int]) -> None:
    """Each start has another number of loader workers than the one before."""
    job = None
    for trouble in TROUBLE[world]:
        job = job or run.supervise(world, *options, WORKERS[len(run.jobs) % 2])
        run.reach(max(next(moments), max(run.steps(), default=0) + 1), job)
        if trouble == "kill":
            rank_processes(job)[world - 1].send_signal(signal.SIGKILL)
        else:
            job.signal()
            expect_stop(run, job)
            job = None


@pytest.mark.parametrize("adapter", [True, *drills(False)])
def test_five_stops_a_kill_and_two_other_worlds(
    run: Run, undisturbed: Callable[..., Run], chats: tuple[str, ...], adapter: bool
) -> None:
    """With accumulation in every world. What a world has done is, to the bit, what it does without
    any trouble from where the one before has left the run; no sample is missed or comes twice."""
    options = (LONG, *chats)
    if adapter:
        begin(run, undisturbed(2, *options))
    moments = iter(sorted(random.Random(adapter).sample(range(2, 50), 6)))
    expected: dict[int, tuple[float, float]] = {}
    for world in TROUBLE:
        alone = Run(run.folder.with_name(f"alone-{world}"), run.data, run.overrides)
        if run.record.path.exists():
            alone.go_on_from(run)
        suffer(run, world, options, moments)
        alone.complete(world, *options)
        expected.update(alone.steps())
    run.complete(world, *options)
    assert run.steps() == expected
    assert run.weights() == alone.weights()
    assert len(run.events("stopped")) == 5
    assert len(run.events("restarting")) == 1
    taken = run.samples()
    assert {step: sorted(ids) for step, ids in taken.items()} == {
        step: list(range(8 * (step - 1), 8 * step)) for step in range(1, STEPS + 1)
    }
