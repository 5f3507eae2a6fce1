"""What stands beside the Trainer's own checkpoint: what its loop knows, and what it had yet to do.

One file a rank, `kempner-<rank>.pt`; a checkpoint of before there were any has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from kempner.integrations.trainer.place import TrainerPlace

HELD = (
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_pending_metrics",
    "_total_train_tokens",
    "_entropy_window_stats",
    "_last_world_entropy",
)
"""Attributes of TRL's trainers that live across steps and are in no checkpoint of theirs."""


@dataclass(frozen=True)
class DueWork:
    """What the Trainer had yet to do after the step of a checkpoint, in its order; `ends` is
    whether a callback had ended the training, and `grad_norm` and `learning_rate` are for the log.
    """

    evaluate: bool = False
    save: bool = False
    epoch_end: bool = False
    ends: bool = False
    grad_norm: float | None = None
    learning_rate: float | None = None

    @property
    def anything(self) -> bool:
        """Whether there is something to make up."""
        return self.evaluate or self.save or self.epoch_end


@dataclass(frozen=True)
class TrainerProgress:
    """What a rank's loop knows beside the Trainer's state.

    `loss` is the sum of the losses since the last log, which was after step `logged`; `total_loss`
    that of those before. `first_step` is where the run began, `seconds` how long it has trained,
    `kept` the steps that the Trainer itself saved. `callbacks` are the states of its callbacks, by
    class and in order; `held` is what a trainer of TRL holds.
    """

    place: TrainerPlace | None = None
    due: DueWork = DueWork()
    loss: torch.Tensor | None = None
    total_loss: float = 0.0
    logged: int = 0
    first_step: int = 0
    seconds: float = 0.0
    kept: tuple[int, ...] = ()
    callbacks: tuple[tuple[str, dict[str, Any]], ...] = ()
    held: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path, rank: int) -> None:
        """Write it as this rank's."""
        assert self.place is not None  # only one of before there were any has none
        nested = {"place": vars(self.place), "due": vars(self.due)}
        torch.save(vars(self) | nested, _file(folder, rank))

    @classmethod
    def load(cls, folder: Path, rank: int, ranks: int) -> TrainerProgress | None:
        """This rank's of a checkpoint, or of other ranks than before what is true of them all.

        None if the checkpoint is of before there were any.
        """
        if not _file(folder, 0).exists():
            return None
        first = cls._read(folder, 0)
        assert first.place is not None  # none is written without
        if first.place.ranks == ranks:
            return first if rank == 0 else cls._read(folder, rank)
        all_of_them = [cls._read(folder, old) for old in range(first.place.ranks)]
        losses = [each.loss for each in all_of_them if each.loss is not None]
        return replace(first, loss=torch.stack(losses).mean(0))

    @classmethod
    def _read(cls, folder: Path, rank: int) -> TrainerProgress:
        fields = torch.load(_file(folder, rank), map_location="cpu", weights_only=True)
        place, due = TrainerPlace(**fields["place"]), DueWork(**fields["due"])
        return cls(**fields | {"place": place, "due": due})


def callback_states(trainer: Trainer) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Of the callbacks that have a state, each with its class, in order."""
    return tuple((type(each).__name__, each.state()) for each in _stateful(trainer))


def restore_callbacks(trainer: Trainer, states: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    """Give each callback what the one of its class, first to first, had."""
    left = list(states)
    for callback in _stateful(trainer):
        mine = next(
            (at for at, (name, _) in enumerate(left) if name == type(callback).__name__), None
        )
        if mine is not None:
            for name, value in left.pop(mine)[1].get("attributes", {}).items():
                setattr(callback, name, value)


def held_by(trainer: Trainer) -> dict[str, Any]:
    """What a trainer of TRL holds across steps."""
    return {name: _plain(getattr(trainer, name)) for name in HELD if hasattr(trainer, name)}


def give_back(trainer: Trainer, held: dict[str, Any]) -> None:
    """The trainer holds it again."""
    known = {name: held[name] for name in held if hasattr(trainer, name)}
    _refill(vars(trainer), send_to_device(known, trainer.args.device))


def _stateful(trainer: Trainer) -> list[Any]:
    return [
        each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)
    ]


def _plain(value: Any) -> Any:
    """Without the classes that a file of weights only does not take."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _refill(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set what is in `values`; dicts stay the objects that they are."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _refill(into[key], value)
        else:
            into[key] = value


def _file(folder: Path, rank: int) -> Path:
    return folder / f"kempner-{rank}.pt"
