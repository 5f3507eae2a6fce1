"""The batches of a loop's steps: from a loader, and held by its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kempner.checkpoint.registered.everything import Everything
from kempner.checkpoint.registered.objects import Held
from kempner.data.serve.places import Supply

NAME = "data"
"""Under which a checkpoint holds the place."""


class Batches:
    """What each step trains on: a batch, or a list of `accumulate` of them."""

    def __init__(self, supply: Supply, accumulate: int | None) -> None:
        self._supply, self._accumulate = supply, accumulate
        self._before: dict[str, Any] | None = None
        self._put_back = False
        self.epoch = 0
        """The epoch that the last batch belonged to."""

    def take(self) -> Any:
        """What the next step trains on."""
        self._before = self._supply.state_dict()
        if self._accumulate is None:
            return self._one()
        return [self._one() for _ in range(self._accumulate)]

    def _one(self) -> Any:
        batch, self.epoch = self._supply.take()
        return batch

    def put_back(self) -> None:
        """The step that was begun is not made: its batches are those of the next start."""
        self._put_back = self._before is not None

    def close(self) -> None:
        """Let go of what reads."""
        self._supply.close()

    def held_with(self, everything: Everything) -> Everything:
        """With the place as part of each checkpoint."""
        objects = everything.registered
        held = {NAME: Held(self._place, self._go_to)}
        if self._supply.shared:
            return replace(
                everything, registered=replace(objects, shared={**objects.shared, **held})
            )
        return replace(
            everything, registered=replace(objects, per_rank={**objects.per_rank, **held})
        )

    def _place(self) -> Mapping[str, Any]:
        if self._put_back and self._before is not None:
            return self._before
        return self._supply.state_dict()

    def _go_to(self, place: dict[str, Any]) -> None:
        self._supply.load_state_dict(place)
