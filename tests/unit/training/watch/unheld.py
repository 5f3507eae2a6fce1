"""Loops that change what survive() does not hold; each is refused in a sentence.

unheld.py FOLDER: prints, for each, after which step and what was said; null if nothing was.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from kempner import ResumableBatchSampler, ResumableDataLoader, survive
from kempner.run.process.exit_codes import UsageError

STEPS, SAVE_EVERY = 9, 4

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
points = TensorDataset(torch.randn(64, 4))
schedule: Any = None
registered: dict[str, object] = {}
Step = Callable[[int], object]


def train(x: Tensor) -> None:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def plain() -> Step:
    return lambda step: train(torch.randn(8, 4))


def with_train(also: Step) -> Step:
    def step(number: int) -> None:
        train(torch.randn(8, 4))
        also(number)

    return step


def scheduler() -> Step:
    global schedule
    schedule = StepLR(optimizer, 2)
    return with_train(lambda _: schedule.step())


def scheduler_by_epoch() -> Step:
    by_epoch = StepLR(optimizer, 2)
    return with_train(lambda step: step % 3 == 0 and by_epoch.step())


def schedulers_in_turn() -> Step:
    in_turn = SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 2)], [3])
    return with_train(lambda _: in_turn.step())


def plateau() -> Step:
    on_plateau = ReduceLROnPlateau(optimizer)
    return with_train(lambda _: on_plateau.step(1.0))


def scheduler_made_in_the_loop() -> Step:
    made: list[Any] = []

    def step(number: int) -> None:
        if number == 2:
            made.append(StepLR(optimizer, 2))
        for schedule in made:
            schedule.step()

    return with_train(step)


def scheduler_that_rests() -> Step:
    schedule = StepLR(optimizer, 2)
    return with_train(lambda _: schedule.get_last_lr())


def another_optimizer() -> Step:
    critic = nn.Linear(4, 1)
    critics = torch.optim.Adam(critic.parameters())

    def step(number: int) -> None:
        critic(torch.randn(2, 4)).sum().backward()
        critics.step()

    return with_train(step)


def inner_optimizer() -> Step:
    """Made anew in each step, so that nothing of it lasts."""

    def step(number: int) -> None:
        clone = copy.deepcopy(model)
        inner = torch.optim.Adam(clone.parameters())
        clone(torch.randn(2, 4)).sum().backward()
        inner.step()

    return with_train(step)


def averaged() -> Step:
    average = AveragedModel(model)
    return with_train(lambda _: average.update_parameters(model))


def teacher_now_and_then() -> Step:
    teacher = copy.deepcopy(model)
    return with_train(lambda step: step == 4 and teacher.load_state_dict(model.state_dict()))


def frozen_teacher() -> Step:
    frozen = copy.deepcopy(model).requires_grad_(False)
    return with_train(lambda _: frozen(torch.randn(2, 4)))


def scaler() -> Step:
    scaling = torch.amp.GradScaler("cpu")

    def step(number: int) -> None:
        scaling.scale(model(torch.randn(8, 4)).sum()).backward()  # type: ignore[no-untyped-call]
        scaling.step(optimizer)
        scaling.update()

    return step


def shuffled_loader() -> Step:
    batches = iter(DataLoader(points, 4, shuffle=True))
    return lambda step: train(next(batches)[0])


def loader_in_cycles() -> Step:
    batches = itertools.cycle(DataLoader(points, 4))
    return lambda step: train(next(batches)[0])


def loader_of_the_loop() -> Step:
    found: list[Any] = []

    def step(number: int) -> None:
        if not found:
            found.append(iter(DataLoader(points, 4, shuffle=True)))
        train(next(found[0])[0])

    return step


def whole_evaluations() -> Step:
    loader = DataLoader(points, 4, shuffle=True)

    def step(number: int) -> None:
        with torch.no_grad():
            model.eval()
            for (x,) in loader:
                model(x)
            next(iter(loader))
            model.train()

    return with_train(step)


def resumable_loader() -> Step:
    sampler = ResumableBatchSampler(points, 4, infinite=True, seed=1)
    batches = iter(ResumableDataLoader(points, sampler))
    return lambda step: train(next(batches)[0])


def held_within() -> Step:
    """An object that is registered holds the module and the scheduler."""

    class Teaching:
        def __init__(self) -> None:
            self.teacher, self.schedule = copy.deepcopy(model), StepLR(optimizer, 2)

        def state_dict(self) -> dict[str, Any]:
            return {"teacher": self.teacher.state_dict(), "schedule": self.schedule.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("nothing was saved")

    teaching = registered["teaching"] = Teaching()

    def step(number: int) -> None:
        teaching.teacher.load_state_dict(model.state_dict())
        teaching.schedule.step()

    return with_train(step)


def late_buffer() -> Step:
    def step(number: int) -> None:
        if number == 3:
            model.register_buffer("late", torch.zeros(1))

    return with_train(step)


LOOPS = [
    plain,
    scheduler,
    scheduler_by_epoch,
    schedulers_in_turn,
    plateau,
    scheduler_made_in_the_loop,
    scheduler_that_rests,
    another_optimizer,
    inner_optimizer,
    averaged,
    teacher_now_and_then,
    frozen_teacher,
    scaler,
    shuffled_loader,
    loader_in_cycles,
    loader_of_the_loop,
    whole_evaluations,
    resumable_loader,
    held_within,
    late_buffer,
]


def said(loop: Callable[[], Step], run: Path) -> tuple[int, str] | None:
    registered.clear()
    step_of, done = loop(), 0
    options: dict[str, Any] = {"steps": STEPS, "save_every": SAVE_EVERY, "run_dir": run}
    try:
        for step in survive(model, optimizer, state=registered, **options):
            step_of(step)
            done = step
    except UsageError as error:
        return done, str(error)
    finally:
        model._buffers.pop("late", None)
    return None


def changed_before_the_loop(run: Path) -> tuple[int, str] | None:
    steps = survive(model, optimizer, steps=STEPS, save_every=SAVE_EVERY, run_dir=run)
    model(torch.randn(8, 4))  # in training mode
    done = 0
    try:
        for step in steps:
            train(torch.randn(8, 4))
            done = step
    except UsageError as error:
        return done, str(error)
    return None


def main(folder: Path) -> None:
    found = {loop.__name__: said(loop, folder / loop.__name__) for loop in LOOPS}
    found["changed_before_the_loop"] = changed_before_the_loop(folder / "changed")
    print(json.dumps(found))


main(Path(sys.argv[1]))
