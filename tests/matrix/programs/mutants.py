"""Mistakes that are planted into kempner in a rank, each of which harms what is resumed.

A cell that notices one shows what the matrix is worth: `test_planted_mistakes.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.registered.objects import Held
from kempner.data.serve import places
from kempner.training.session import Session


def schedule_begins_again() -> None:
    """A scheduler is registered, and not loaded."""
    LRScheduler.load_state_dict = lambda self, state: None  # type: ignore[method-assign]


def objects_begin_again() -> None:
    """So is every object that is no module and no optimizer."""
    begin = Held.__init__

    def forgetful(self: Held, give: Any, take: Any, *more: Any, **options: Any) -> None:
        begin(self, give, lambda saved: None, *more, **options)

    Held.__init__ = forgetful  # type: ignore[method-assign]


def moments_begin_again() -> None:
    """Weights are loaded, and the optimizer's moments are not."""

    def forget(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    held: list[Optimizer] = []
    begin = Optimizer.__init__

    def note(self: Optimizer, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        held.append(self)

    def restored(state: Any) -> Any:
        for optimizer in held:
            forget(optimizer)
        return state

    Optimizer.__init__ = note  # type: ignore[method-assign]
    _after_restore(restored)


def batch_is_left_out() -> None:
    """The place in the data is one batch too far."""
    for kind in (places.MappedLoader, places.StreamedLoader):
        load = kind.load_state_dict

        def too_far(self: Any, state: Any, load: Callable[..., None] = load) -> None:
            load(self, state)
            if state:
                self.take()

        kind.load_state_dict = too_far  # type: ignore[method-assign]


def step_is_left_out() -> None:
    """A resume begins a step too late."""
    _after_restore(lambda state: state and replace(state, step=state.step + 1))


def draws_follow_the_start() -> None:
    """Random numbers follow from this start, and not from the run."""
    made: dict[int, int] = {}
    seed_step = Session.seed_step

    def by_start(self: Session, seed: int, step: int) -> None:
        if not made:
            random.seed()
            np.random.seed()
        seed_step(self, seed, made.setdefault(step, len(made) + 1))

    Session.seed_step = by_start  # type: ignore[method-assign]


def _after_restore(then: Callable[[Any], Any]) -> None:
    restore = CheckpointEngine.restore

    def restored(self: CheckpointEngine, *arguments: Any, **options: Any) -> Any:
        return then(restore(self, *arguments, **options))

    CheckpointEngine.restore = restored  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant
    for plant in (
        schedule_begins_again,
        objects_begin_again,
        moments_begin_again,
        batch_is_left_out,
        step_is_left_out,
        draws_follow_the_start,
    )
}
