"""One rank of a test: a loop under `survive`'s Survivor, again and again, in which ranks are late.

Usage: late_ranks.py FOLDER SCHEDULES. In each schedule a rank is up to 2 s late now and then,
between any two calls of the loop or of a save; saves fail on one rank, and ranks are asked to stop.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[2]))
from patience import scaled
from saved import open_manager

from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.registered.groups import gather
from kempner.cluster.world import World
from kempner.config.resilience import FailPoint
from kempner.config.site import DistributedSection
from kempner.run.control.heartbeat import Progress
from kempner.run.process.exit_codes import ExitCode, RunError, StopReason, UsageError
from kempner.run.process.fail_points import set_fail_point
from kempner.run.record.attempts import Attempt
from kempner.run.record.events import CheckpointFailed, Completed, LedgerEvent, Stopped
from kempner.run.record.run_dir import RunDirectory
from kempner.training.groups.process_groups import adopt
from kempner.training.homes import Home
from kempner.training.main import Ownership
from kempner.training.rank_link.shutdown import StopListener
from kempner.training.session import Session
from kempner.training.survive import LoopPlan, Survivor
from kempner.training.watch import HeldObjects, Watch

LONGEST = 2.0
"""Seconds that a rank is late at most."""

CALLS = ("all_reduce", "broadcast", "gather", "all_gather_object", "broadcast_object_list")

PATIENCE = timedelta(seconds=scaled(60))
dist.init_process_group("gloo", timeout=PATIENCE)
rank, world = dist.get_rank(), dist.get_world_size()
place, section = World(rank, world, rank, world, "none"), DistributedSection(timeout=scaled(60))
ranks = adopt(place, torch.device("cpu"), section)
folder, schedules = Path(sys.argv[1]), int(sys.argv[2])


@contextmanager
def late(pause: Callable[[], float]) -> Iterator[None]:
    """While it is open, `pause()` seconds pass before and after each call that waits for ranks."""

    def wrapped(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        time.sleep(pause())
        result = call(*arguments, **options)
        time.sleep(pause())
        return result

    replaced = {name: partial(wrapped, getattr(dist, name)) for name in CALLS}
    with patch.multiple(dist, **replaced):
        yield


@contextmanager
def failing(which: dict[int, int]) -> Iterator[None]:
    """While it is open, these saves fail, each on the rank that is named."""
    begun = 0

    def write(step: int | None) -> None:
        nonlocal begun
        begun += 1
        if which.get(begun) == rank:
            raise OSError("no space left on device")

    set_fail_point(FailPoint.WRITE, write)
    yield
    set_fail_point(FailPoint.WRITE, None)


class Unlooking(Watch):
    """It has the ranks look at nothing together: they would wait for a save that is held up."""

    def end_step(self, save: bool) -> bool:
        super().end_step(save)
        return False


def run(
    name: str,
    steps: int,
    save_every: int,
    stop_after: float | None = None,
    in_step: Callable[[int, CheckpointEngine], object] = lambda step, checkpoints: None,
) -> tuple[str, int, int]:
    """Train for `steps` steps, and call `in_step` in each.

    How it ended, the steps made, and the saves that are said to have failed.
    """
    torch.manual_seed(0)  # a checkpoint holds what is the same on all ranks once
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    recorded: list[LedgerEvent] = []
    directory = RunDirectory(folder / name)
    checkpoints = open_manager(directory, model, optimizer, ranks.saves, record=recorded.append)
    shutdown = StopListener()
    shutdown.join_group(60.0)
    stop = threading.Timer(stop_after or 0.0, shutdown.stop, (StopReason.TIME_LIMIT, 40.0))
    if stop_after is not None:
        stop.start()
    link = SimpleNamespace(
        progress=Progress(),
        record=lambda attempt, event: recorded.append(event),
        launch=None,
    )
    session = Session(
        link,  # type: ignore[arg-type]
        Ownership(Attempt(1, "00000000")),
        Home(directory, directory, 1),
        ranks,
        shutdown,
        SimpleNamespace(code=None),  # type: ignore[arg-type]
    )
    watch = Unlooking(gather(model, optimizer, {}, {}), HeldObjects(model, optimizer, {}, {}))
    survivor = Survivor(LoopPlan(steps, save_every, seed=0), session, checkpoints, None, watch)
    try:
        for step in survivor:
            in_step(step, checkpoints)
            model(torch.ones(2, 8)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            checkpoints.release_staging()
            optimizer.step()
            optimizer.zero_grad()
        end = ExitCode.COMPLETED.name
    except RunError as error:
        end = type(error).__name__
    except SystemExit as leave:
        end = ExitCode(leave.code).name
    stop.cancel()
    committed = checkpoints.committed_step
    for event in recorded:
        if isinstance(event, Completed):
            assert committed == event.step == steps
        if isinstance(event, Stopped):
            assert event.step - event.lost_steps <= (committed or 0)
    checkpoints.close()
    failures = sum(isinstance(event, CheckpointFailed) for event in recorded)
    return end, survivor.train_state.step, failures


def check(name: str, fails: dict[int, int], ended: tuple[str, int, int]) -> None:
    """All ranks ended alike, and no save is said to have failed that has not."""
    told: list[Any] = [None] * world
    dist.all_gather_object(told, ended)
    assert len({(end, step) for end, step, _ in told}) == 1, (name, told)
    assert told[0][2] <= len(fails), (name, told)
    assert fails or told[0][0] in ("COMPLETED", "STOPPED"), (name, told)


@contextmanager
def rank_1_hears_late() -> Iterator[None]:
    """While it is open, it learns how a save ended only once it has voted for the fourth time."""
    votes, voted = 0, threading.Event()
    all_reduce, all_gather_object = dist.all_reduce, dist.all_gather_object

    def vote(*arguments: Any, **options: Any) -> Any:
        nonlocal votes
        work = all_reduce(*arguments, **options)
        votes += "async_op" in options
        if votes == 4:
            voted.set()
        return work

    def hear(*arguments: Any, **options: Any) -> None:
        all_gather_object(*arguments, **options)
        if rank == 1 and threading.current_thread() is not threading.main_thread():  # of a save
            assert voted.wait(scaled(60)), "rank 1 has not voted"

    with patch.multiple(dist, all_reduce=vote, all_gather_object=hear):
        yield


def see_the_failure(step: int, checkpoints: CheckpointEngine) -> None:
    """Rank 0 votes for the fourth time when the save of step 2 has failed."""
    if rank == 0 and step == 3:
        checkpoints.settle(scaled(60.0))
        assert checkpoints.failures.count == 1


ranks.agree_on({"steps": 6, "seed": 0})
with pytest.raises(UsageError, match=r"seed is not the same on all ranks: rank 1 on .* has 1, "):
    ranks.agree_on({"steps": 6, "seed": rank})

for steps in (6, 3):  # the vote is followed by another step, and by the final save
    with rank_1_hears_late(), failing({1: 1}):
        ended = run(f"heard-late-{steps}", steps, save_every=2, in_step=see_the_failure)
    assert ended[:2] == ("COMPLETED", steps), ended
    check(f"heard-late-{steps}", {1: 1}, ended)

for schedule in range(schedules):
    rng, mine = random.Random(schedule), random.Random(schedule * world + rank)
    often = rng.choice((0.05, 0.2))
    fails = {number: rng.randrange(world) for number in range(1, 9) if rng.random() < 0.4}
    stop_after = rng.choice((None, rng.uniform(0.0, 10.0)))
    if mine.random() < 0.3:
        stop_after = None  # the others are asked
    pause = lambda mine=mine, often=often: (  # noqa: E731
        LONGEST * mine.random() if mine.random() < often else 0.0
    )
    with late(pause), failing(fails):
        ended = run(f"{schedule}", rng.randint(3, 6), rng.randint(1, 2), stop_after)
    check(f"schedule {schedule}", fails, ended)

print(f"rank {rank} has seen it all", flush=True)
os._exit(0)
