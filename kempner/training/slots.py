"""`Slots`: gradient and loss of your own loop are the same bits on any number of ranks.

    slots = Slots(model, 16)
    for step in survive(model, optimizer, steps=1000, save_every=50):
        for slot in slots.of(step):
            loss = loss_of(model, batch(slots.samples(slot, 4, len(dataset))))
            slots.add(loss / 16)
        loss = slots.sum()
        optimizer.step()
        optimizer.zero_grad()

The global batch is a fixed number of slots, whatever the number of ranks. Each has its samples, its
random numbers and its gradient; these are added up in the order of `model/spec/slot_tree.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kempner.checkpoint.tensors.state import is_sharded
from kempner.cluster.world import discover
from kempner.data.order.global_batches import samples_at
from kempner.model.spec.slot_tree import SubtreeSums, slots_of
from kempner.run.process.exit_codes import UsageError
from kempner.training.compute.forward_backward import set_rng
from kempner.training.compute.slot_exchange import sum_of_slots, summed_over_replicas


class Slots:
    """The slots of the global batch, which the ranks share; call it on every rank.

    Gradients are added up in float32, or in float64 if a parameter is of that type. After `sum`
    every rank has the whole gradient, so that `torch.nn.utils.clip_grad_norm_` and the optimizer do
    the same on all. Needs as many CPU threads in every world, by `torch.set_num_threads`.

    Args:
        model: with the same parameters on all ranks, in no wrapper that adds gradients up itself.
        total: the number of slots in a global batch, at least one for each rank.
        seed: of the order of samples and of what a slot draws, as dropout does.
        group: the ranks that share the slots; all of them by default.
    """

    def __init__(
        self,
        model: nn.Module,
        total: int,
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _refuse_what_adds_up_itself(model)
        self._rank, self._world = _place(group)
        if total < self._world:
            raise UsageError(
                f"Slots(total={total}): there are {self._world} ranks, and each needs a slot; "
                "start fewer, or divide the global batch into more"
            )
        self._model, self._total, self._seed, self._group = model, total, seed, group
        self._step = 0
        self._begin()

    @property
    def own(self) -> range:
        """The slots of this rank, which follow each other."""
        return slots_of(self._total, self._rank, self._world)

    def of(self, step: int) -> Iterator[int]:
        """This rank's slots in step `step`, counted from 1. Each begins with torch's generators
        seeded from seed, step and slot, and needs one `add`."""
        self._step = step
        self._begin()
        for slot in self.own:
            set_rng(self._seed, step, slot, 0)
            yield slot
            if self._next != slot + 1:
                raise UsageError(f"slot {slot} of step {step} got no gradient: call add(loss) once")

    def samples(self, slot: int, size: int, dataset: int) -> list[int]:
        """The numbers of the `size` samples of a slot in this step, of `dataset` samples: a
        permutation of all for each epoch. Follows from seed, step and slot alone."""
        first = ((self._step - 1) * self._total + slot) * size
        return samples_at(range(first, first + size), dataset, self._seed)

    def add(self, loss: Tensor) -> None:
        """Run the backward of a slot's `loss`, a scalar: its part of the step's, which is the sum.
        The parameters have no gradient meanwhile."""
        if self._next not in self.own:
            raise UsageError("Slots.add: call it once for each slot that slots.of(step) gives")
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = self._parameters
        gradient = torch.cat([self._taken(each).flatten() for each in parameters])
        self._losses[self._next] = loss.detach()
        self._sums.push(range(self._next, self._next + 1), gradient)
        self._next += 1

    def sum(self) -> Tensor:
        """The loss of the step; its gradient becomes that of the parameters. To be called by every
        rank, after its last slot. A parameter that no slot has used gets zeros."""
        if self._next != self.own.stop:
            raise UsageError("Slots.sum: call it after the last slot of `slots.of(step)`")
        parameters, losses = self._parameters, self._losses
        owned = [slots_of(self._total, rank, self._world) for rank in range(self._world)]
        sizes = [parameter.numel() for parameter in parameters]
        values, device = self._sums.values, losses.device
        whole = summed_over_replicas(values, owned, sum(sizes), self._group, device)
        if self._world > 1:
            dist.all_reduce(losses, group=self._group)  # of one rank each, and zero on all others
        for parameter, part in zip(parameters, torch.split(whole, sizes), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)
        return sum_of_slots(losses + 0.0)  # -0 is 0 where ranks have added others

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _begin(self) -> None:
        parameters = self._parameters
        for parameter in parameters:
            parameter.grad = None
        types = (parameter.dtype for parameter in parameters)
        self._dtype = reduce(torch.promote_types, types, torch.float32)
        device = parameters[0].device if parameters else None
        self._losses = torch.zeros(self._total, dtype=self._dtype, device=device)
        self._sums = SubtreeSums[Tensor](Tensor.add_)
        self._next = self.own.start

    def _taken(self, parameter: nn.Parameter) -> Tensor:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(parameter, dtype=self._dtype, requires_grad=False)
        return gradient.to(self._dtype)


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank and number of ranks in the group. Raises `UsageError` if ranks have not met yet."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    try:
        world = discover(os.environ)
    except ValueError as error:
        raise UsageError(f"Slots does not know which rank this is: {error}") from None
    if world.size > 1:
        raise UsageError("Slots(...): call it after torch.distributed.init_process_group")
    return 0, 1


def _refuse_what_adds_up_itself(model: nn.Module) -> None:
    parameters = [*model.parameters()]
    wrapped = isinstance(model, DistributedDataParallel)
    if wrapped or any(map(is_sharded, parameters)):
        kind = "DistributedDataParallel" if wrapped else "fully_shard"
        raise UsageError(
            f"Slots(model): {kind} adds gradients up itself, in an order of the ranks; give the "
            "model without it"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise UsageError("Slots(model): no parameter of the model trains")
