"""Loops with what they hold without registering it: undisturbed, and stopped and resumed.

loops.py FOLDER: prints which features differ, and after which stop.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from patience import wait_until
from torch import Tensor, nn

from kempner import survive

STEPS, SAVE_EVERY = 11, 5
STOPS = (2, SAVE_EVERY - 1, SAVE_EVERY, SAVE_EVERY + 1, STEPS - 1)
"""After which step: the ranks agree on it in the vote of the step before."""


class Loop:
    """A small model, its optimizer, and what a step does with them."""

    order = 1
    """Of the groups and of the parameters in each: -1 is the other way round."""

    def __init__(self, resumed: bool) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
        named = [*self.model.named_parameters()][:: -1 if resumed else 1]
        weights = [p for name, p in named if name.endswith("weight")]
        biases = [p for name, p in named if name.endswith("bias")]
        groups: list[dict[str, Any]] = [
            {"params": weights, "lr": 0.01, "weight_decay": 0.1},
            {"params": biases, "lr": 0.03, "weight_decay": 0.0},
        ]
        self.weights, self.biases = groups
        self.optimizer = torch.optim.AdamW(groups[:: -1 if resumed else 1])
        self.state: dict[str, object] = {}

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - x.sum(1, keepdim=True)).square().mean()

    def step(self, step: int) -> float:
        loss = self.loss(torch.randn(8, 4))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class RateByHand(Loop):
    def step(self, step: int) -> float:
        if step in (3, 6):
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        return super().step(step)


class RateByHandWithSchedule(RateByHand):
    """And with a schedule whose rates differ by group."""

    def __init__(self, resumed: bool) -> None:
        super().__init__(resumed)
        decays = [0.9 if g["weight_decay"] else 0.7 for g in self.optimizer.param_groups]
        lambdas = [lambda step, decay=decay: decay**step for decay in decays]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambdas)
        self.state = {"schedule": self.schedule}

    def step(self, step: int) -> float:
        loss = super().step(step)
        self.schedule.step()
        return loss


class LateGroup(Loop):
    """The last layer is trained from the fourth step on."""

    def __init__(self, resumed: bool) -> None:
        super().__init__(resumed)
        last = self.model.get_submodule("2").parameters()
        self.optimizer = torch.optim.AdamW(self.model.get_submodule("0").parameters(), lr=0.02)
        self.last = [*last][:: -1 if resumed else 1]

    def step(self, step: int) -> float:
        if step == 4:
            self.optimizer.add_param_group({"params": self.last, "lr": 0.1})
        return super().step(step)


class GroupRemoved(Loop):
    """Its biases are frozen from the fourth step on."""

    def step(self, step: int) -> float:
        if step == 4:
            groups = self.optimizer.param_groups
            groups[:] = [group for group in groups if group["weight_decay"]]
        return super().step(step)


class GlobalGenerators(Loop):
    """Draws before the loop as well, at every start."""

    def __init__(self, resumed: bool) -> None:
        super().__init__(resumed)
        random.seed(5)
        np.random.seed(6)
        self.offset = random.random() * np.random.rand(3).sum()

    def step(self, step: int) -> float:
        if step == 1:
            assert random.random() != self.offset
        loss = self.loss(torch.randn(8, 4) * random.random() + float(np.random.rand()))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class AccumulatedByHand(Loop):
    def step(self, step: int) -> float:
        loss = self.loss(torch.randn(8, 4))
        loss.backward()
        if step % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()


class ZeroedNowAndThen(Loop):
    """Steps with what the steps before have left."""

    def step(self, step: int) -> float:
        loss = self.loss(torch.randn(8, 4))
        if step % 4 == 0:
            self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()
        return loss.item()


class ScheduleFree(Loop):
    """An optimizer that counts in its groups."""

    def step(self, step: int) -> float:
        for group in self.optimizer.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(step)


class Compiled(Loop):
    """Only where it goes on."""

    def __init__(self, resumed: bool) -> None:
        super().__init__(resumed)
        if resumed:
            self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]


FEATURES: list[Callable[[bool], Loop]] = [
    Loop,
    RateByHand,
    RateByHandWithSchedule,
    LateGroup,
    GroupRemoved,
    GlobalGenerators,
    AccumulatedByHand,
    ZeroedNowAndThen,
    ScheduleFree,
    Compiled,
]


def losses(loop: Loop, run: Path, stop: int | None) -> Iterator[float]:
    """Of each step, up to the stop."""
    options: dict[str, Any] = {"steps": STEPS, "save_every": SAVE_EVERY, "run_dir": run}
    steps = survive(loop.model, loop.optimizer, state=loop.state, **options)
    for step in steps:
        yield loop.step(step)
        if stop is not None and step == stop - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(steps._session.shutdown.should_shutdown, "the signal is noticed")


def made(loop: Loop, run: Path, stop: int | None = None) -> list[float]:
    found: list[float] = []
    with suppress(SystemExit):
        for loss in losses(loop, run, stop):
            found.append(loss)
    return found


def weights(loop: Loop) -> list[Any]:
    return [parameter.tolist() for parameter in loop.model.parameters()]


def main(folder: Path) -> None:
    differing: dict[str, list[int]] = {}
    for feature in FEATURES:
        name = feature.__name__
        undisturbed = feature(False)
        expected = made(undisturbed, folder / name / "undisturbed")
        assert len(expected) == STEPS, name
        differing[name] = []
        for stop in STOPS:
            run = folder / name / str(stop)
            found = made(feature(False), run, stop)
            assert len(found) == stop, (name, stop)
            again = feature(True)
            found += made(again, run)
            if (found, weights(again)) != (expected, weights(undisturbed)):
                differing[name].append(stop)
    print(json.dumps(differing))


main(Path(sys.argv[1]))
