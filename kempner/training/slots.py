"""`Slots`: gradient and loss of your own loop are the same bits on any number of ranks.

    slots = Slots(model, 16)
    for step in survive(model, optimizer, steps=1000, save_every=50):
        for slot in slots.of(step):
            loss = loss_of(model, batch(slots.samples(slot, 4, len(dataset))))
            slots.add(loss / 16)
        loss = slots.sum()
        norm = slots.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

The global batch is a fixed number of slots, whatever the number of ranks. Each has its samples, its
random numbers and its gradient; these are added up in the order of `model/spec/slot_tree.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property, reduce
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kempner.checkpoint.tensors.state import is_sharded, local_parts
from kempner.cluster.world import discover
from kempner.data.order.global_batches import samples_at
from kempner.model.spec.communication import Choice
from kempner.model.spec.slot_tree import SubtreeSums, slots_of
from kempner.run.process.exit_codes import UsageError
from kempner.training.compute.any_shard import exact_norm
from kempner.training.compute.forward_backward import set_rng
from kempner.training.compute.optimizer import clip_to
from kempner.training.compute.slot_exchange import (
    add_each,
    sum_of_slots,
    summed_over_replicas,
    take_gradient,
)
from kempner.training.compute.slot_gradient import SlotGradient, groups_of, trained

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


class Slots:
    """The slots of the global batch, which the ranks share; call it on every rank.

    The model is the same on all ranks, or sharded by `fully_shard`: over all ranks, or over shards
    and replicas, also where that is one rank. Gradients are added up in float32, or in float64 if a
    parameter is of that type. After `sum` every rank has the whole gradient, or its shard of it, so
    that the optimizer does the same on all, if it updates each element by itself. Needs as many CPU
    threads in every world, by `torch.set_num_threads`; and for shards on CPUs parameters of float32
    and an optimizer without `fused=True`, which rounds the last elements of a shard otherwise.

    Args:
        model: with the same parameters on all ranks, in no wrapper that adds gradients up itself;
            or after `fully_shard` of the whole.
        total: the number of slots in a global batch, at least one for each rank.
        seed: of the order of samples and of what a slot draws, as dropout does.
        group: the ranks that share the slots; all of them by default, and if the model is sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        total: int,
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _refuse_what_cannot_be(model)
        self._rank, self._world = _place(group)
        if total < self._world:
            raise UsageError(
                f"Slots(total={total}): there are {self._world} ranks, and each needs a slot; "
                "start fewer, or divide the global batch into more"
            )
        self._model, self._total, self._seed, self._group = model, total, seed, group
        self._sharded = _of_shards(model, total, group)
        self._step = 0
        self._begin()

    @property
    def own(self) -> range:
        """The slots of this rank, which follow each other."""
        return slots_of(self._total, self._rank, self._world)

    def of(self, step: int) -> Iterator[int]:
        """This rank's slots in step `step`, counted from 1. Each begins with torch's generators
        seeded from seed, step and slot, and needs one `add`. Ranks that share a sharded model work
        in step: one with fewer slots than others gets its last one again, which does not count."""
        self._step = step
        self._begin()
        for number, slot in enumerate(self._todo, start=1):
            set_rng(self._seed, step, slot, 0)
            yield slot
            if self._added != number:
                raise UsageError(f"slot {slot} of step {step} got no gradient: call add(loss) once")

    def samples(self, slot: int, size: int, dataset: int) -> list[int]:
        """The numbers of the `size` samples of a slot in this step, of `dataset` samples: a
        permutation of all for each epoch. Follows from seed, step and slot alone."""
        first = ((self._step - 1) * self._total + slot) * size
        return samples_at(range(first, first + size), dataset, self._seed)

    def add(self, loss: Tensor) -> None:
        """Run the backward of a slot's `loss`, a scalar: its part of the step's, which is the sum.
        The parameters have no gradient meanwhile."""
        if self._added == len(self._todo):
            raise UsageError("Slots.add: call it once for each slot that slots.of(step) gives")
        slot = self._todo[self._added]
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = self._taken()
        if self._added < len(self.own):
            self._losses[slot] = loss.detach()
            self._sums.push(range(slot, slot + 1), gradients)
        self._added += 1

    def sum(self) -> Tensor:
        """The loss of the step; its gradient becomes that of the parameters. To be called by every
        rank, after its last slot. A parameter that no slot has used gets zeros."""
        if self._added != len(self._todo):
            raise UsageError("Slots.sum: call it after the last slot of `slots.of(step)`")
        if self._sharded is not None:
            self._sharded.exchange(self._sums)
        else:
            self._sum_replicas()
        losses = self._losses
        if self._world > 1:
            dist.all_reduce(losses, group=self._group)  # of one rank each, and zero on all others
        return sum_of_slots(losses + 0.0)  # -0 is 0 where ranks have added others

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradient to a norm of at most `max_norm` (0: leave it); return the norm before,
        a float32 scalar, the same bits for shards and replicas. To be called by every rank, after
        `sum`; `torch.nn.utils.clip_grad_norm_` adds up shards, whose bits follow ranks."""
        found = [parameter.grad for parameter in self._parameters]
        gradients = local_parts(gradient for gradient in found if gradient is not None)
        if len(gradients) < len(found):
            raise UsageError("Slots.clip: call it after slots.sum()")
        ranks = None if self._sharded is None else self._sharded.shard_ranks
        norm = exact_norm(gradients, ranks)
        clip_to(gradients, norm, max_norm)
        return norm

    def _sum_replicas(self) -> None:
        parameters, device = self._parameters, self._losses.device
        owned = [slots_of(self._total, rank, self._world) for rank in range(self._world)]
        sizes = [parameter.numel() for parameter in parameters]
        values = [whole for (whole,) in self._sums.values]
        whole = summed_over_replicas(values, owned, sum(sizes), self._group, device)
        for parameter, part in zip(parameters, torch.split(whole, sizes), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)

    @property
    def _parameters(self) -> list[Tensor]:
        if self._sharded is not None:
            return self._sharded.trained
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    @cached_property
    def _todo(self) -> list[int]:
        own, most = self.own, -(-self._total // self._world)
        again = 0 if self._sharded is None else most - len(own)
        return [*own, *[own[-1]] * again]

    def _begin(self) -> None:
        parameters = self._parameters
        for parameter in parameters:
            parameter.grad = None
        types = (parameter.dtype for parameter in parameters)
        self._dtype = reduce(torch.promote_types, types, torch.float32)
        device = parameters[0].device
        self._losses = torch.zeros(self._total, dtype=self._dtype, device=device)
        self._sums = SubtreeSums[list[Tensor]](add_each)
        self._added = 0
        if self._sharded is not None:
            cast("FSDPModule", self._model).set_requires_gradient_sync(False)

    def _taken(self) -> list[Tensor]:
        """The gradient of the newest slot: each tensor, or all in one."""
        if self._sharded is not None:
            return [gradient.to(self._dtype) for gradient in self._sharded.take()]
        return [
            torch.cat([take_gradient(each, self._dtype).flatten() for each in self._parameters])
        ]


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


def _refuse_what_cannot_be(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "Slots(model): DistributedDataParallel adds gradients up itself, in an order of the "
            "ranks; give the model without it"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("Slots(model): no parameter of the model trains")


def _of_shards(
    model: nn.Module, total: int, group: dist.ProcessGroup | None
) -> SlotGradient | None:
    """What adds up the gradients of a model of `fully_shard`; None if it is not sharded. Raises
    `UsageError` for a model that is sharded in another way."""
    if not any(map(is_sharded, model.parameters())):
        return None
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        raise UsageError(
            "Slots(model): it has sharded parameters, but is not sharded as a whole; call "
            "fully_shard(model) after that of its parts, or give a model without tensor parallelism"
        )
    sharded = [parameter for each in groups_of(model) for parameter in trained(each)]
    known = {parameter.sharded_param for parameter in sharded}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in known:
            raise UsageError(
                f"Slots(model): {name} trains and is not sharded, as all others are; do not have "
                "fully_shard ignore it"
            )
    mesh = sharded[0].mesh_info.mesh
    every = list(range(dist.get_world_size()))
    regular = all(_has_rows(parameter, mesh) for parameter in sharded)
    if not regular or mesh.mesh.flatten().tolist() != every or group is not None:
        raise UsageError(
            "Slots(model): fully_shard has divided it in a way that Slots cannot add up; give it "
            "one mesh of all ranks, of shards or of replicas and shards, and no tensor "
            "parallelism, shard_placement_fn or CPUOffloadPolicy, and Slots no group"
        )
    device = sharded[0].sharded_param.device
    return SlotGradient(model, device, 0, total, mesh, Choice(reduce_once=True))


def _has_rows(parameter: FSDPParam, mesh: DeviceMesh) -> bool:
    """Whether the ranks along the last dimension of a mesh have the parameter's rows."""
    info = parameter.mesh_info
    divided = info.mesh == mesh and info.shard_mesh_dim == mesh.ndim - 1
    rows = parameter.fsdp_placement.dim == 0 and not parameter.is_dtensor
    return divided and rows and not parameter.offload_to_cpu
