"""Writes fingerprints of what a step is made of: each slot's loss and gradient, the sum of
gradients, weights and moments. None depends on the world, with `train.same_on_any_world`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.data.serve.loader import MicroBatch
from kempner.model.spec.slot_tree import slots_of
from kempner.run.output.logs import warn
from kempner.run.output.writers import open_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.training.compute.fingerprint import (
    StateFingerprint,
    TableFingerprint,
    fingerprint,
    name_key,
    summed,
    text_of,
)
from kempner.training.compute.slot_gradient import SlotGradient, Witness


class StepParts:
    """Those of every `interval`-th step. Every method is called on every rank."""

    def __init__(
        self, run: RunDirectory, attempt: int, interval: int, gradient: SlotGradient
    ) -> None:
        self._interval, self._gradient, self._attempt = interval, gradient, attempt
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._lines = open_lines(run.parts, warn) if self._rank == 0 else None
        # Otherwise no rank has all of a slot's.
        self._whole = gradient.choice.turns(gradient.shards) == 1
        self._slots: list[Tensor] = []
        self._sums: dict[str, str] = {}

    def _due(self, step: int) -> bool:
        return step % self._interval == 0

    def add(self, micro_batches: Sequence[MicroBatch], step: int) -> Tensor:
        """As `SlotGradient.add`."""
        self._slots = []
        watch = Witness(self._see_slot, lambda _: None, lambda _: None)
        watched = self._whole and self._due(step)
        return self._gradient.add(micro_batches, step, watch if watched else None)

    def _see_slot(self, _: MicroBatch, loss: Tensor, gradients: Sequence[Tensor]) -> None:
        seen = zip(self._numbers, gradients, strict=True)
        parts = [fingerprint(tensor) * name_key(str(number)) for number, tensor in seen]
        self._slots.append(torch.stack([fingerprint(loss) * name_key("0"), *parts]).sum())

    @cached_property
    def _numbers(self) -> list[int]:
        """From 1 on in the order of the model, which every world has."""
        trained = [each for each in self._gradient.model.parameters() if each.requires_grad]
        order = {id(each): number for number, each in enumerate(trained, 1)}
        return [order[id(each)] for each in self._gradient.trained]

    def before_update(self, step: int, model: nn.Module) -> None:
        """Call before gradients are clipped."""
        if not self._due(step):
            return
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        table = TableFingerprint(found, self._rank, self._world)
        self._sums = _by_name(table.names, summed(table.local()))

    def after_update(self, step: int, state: StateFingerprint) -> Tensor | None:
        """Call after each update; writes the line of a step that is due, and returns the
        fingerprint of its state."""
        if not self._due(step):
            return None
        whole = summed(state.local())
        made = _by_name(state.names, whole)
        count = self._gradient.slots if self._whole else 0
        slots = torch.zeros(count, dtype=torch.int64, device=whole.device)
        own = slots_of(self._gradient.slots, self._rank, self._world)
        if self._slots:
            slots[own.start : own.stop] = torch.stack(self._slots)
        by_slot = _by_name(map(str, range(len(slots))), summed(slots))
        if self._lines is not None:
            place = {"step": step, "attempt": self._attempt, "ranks": self._world}
            self._lines.append({**place, "slots": by_slot, "gradient": self._sums, "state": made})
        return whole.sum()


def _by_name(names: Iterable[str], prints: Tensor) -> dict[str, str]:
    return dict(zip(names, map(text_of, prints.tolist()), strict=True))
