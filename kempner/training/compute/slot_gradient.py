"""A step's gradient and loss as sums over the slots of the global batch, in the order of
`model/spec/slot_tree.py`: the same bits on any number of data parallel ranks, replicated or
sharded.

FSDP reduces nothing here. After each backward this rank takes the whole gradient of its slot and
adds it to those of its largest complete subtrees. After the last one, these are exchanged, first
among the ranks that shard the parameters, of which each gets its own rows, then among replicas, of
which each gets an equal part, adds it up, and hands it to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kempner.data.serve.loader import IGNORE, MicroBatch
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.model.spec.slot_tree import SubtreeSums, slots_of
from kempner.run.control.heartbeat import Waiting, untimed
from kempner.training.compute.forward_backward import set_rng, summed_loss
from kempner.training.compute.slot_exchange import exchanged, sum_of_slots, summed_over_replicas

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    Parts = Sequence[FSDPParam]


@dataclass(frozen=True)
class SlotGradient:
    """As `StepGradient`, of a model that `fully_shard` has sharded over `mesh`, also where that has
    one rank only; `slots` is their number in the global batch. What dropout draws follows from the
    slot. Every rank passes as many micro batches; those behind its last slot do not count."""

    model: nn.Module
    device: torch.device
    seed: int
    slots: int
    mesh: DeviceMesh
    choice: Choice = EACH_MICRO_BATCH
    waiting: Waiting = untimed

    def add(self, micro_batches: Sequence[MicroBatch], step: int) -> Tensor:
        """The loss of the step whose gradient becomes that of the parameters; as
        `StepGradient.add`."""
        own = slots_of(self.slots, dist.get_rank(), dist.get_world_size())
        valid = self._count_tokens(micro_batches)
        losses = torch.zeros(self.slots, device=self.device)
        sums = SubtreeSums[list[Tensor]](_add_each)
        sharded = self._sharded
        sharded.set_requires_gradient_sync(False)
        for number, micro_batch in enumerate(micro_batches):
            slot = own.start + number
            set_rng(self.seed, step, slot, 0)
            last = number == len(micro_batches) - 1
            sharded.set_reshard_after_backward(last or not self.choice.keep_parameters)
            loss = summed_loss(self.model, micro_batch, self.device)
            (loss / valid).backward()  # type: ignore[no-untyped-call]
            gradients = [taken(parameter) for parameter in chain(*self._groups)]
            if slot in own:
                losses[slot] = loss.detach()
                sums.push(range(slot, slot + 1), gradients)
        with self.waiting("the exchange of gradients"):
            self._exchange(sums.values)
        with self.waiting("the sum of losses"):
            dist.all_reduce(losses)  # of one rank each, and zero on all others
        return (sum_of_slots(losses) / valid)[None]

    def _count_tokens(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        targets = [batch.targets.to(self.device, non_blocking=True) for batch in micro_batches]
        valid = torch.stack([(each != IGNORE).sum() for each in targets]).sum()
        with self.waiting("the count of tokens"):
            dist.all_reduce(valid)  # an integer: in any order
        return valid.clamp(min=1).float()

    @cached_property
    def _sharded(self) -> FSDPModule:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(self.model, FSDPModule)
        return self.model

    @cached_property
    def _groups(self) -> list[Parts]:
        """The parameters that train, as they are gathered."""
        from torch.distributed.fsdp import FSDPModule

        modules = (m for m in self.model.modules() if isinstance(m, FSDPModule))
        groups = (g for m in modules for g in m._get_fsdp_state()._fsdp_param_groups)
        once = {id(group): group for group in groups}.values()  # modules may share theirs
        found = ([p for p in g.fsdp_params if p.sharded_param.requires_grad] for g in once)
        return [group for group in found if group]

    def _exchange(self, sums: list[list[Tensor]]) -> None:
        """Give the parameters this rank's shard of the whole sum; empties `sums` as it goes."""
        for group in self._groups:
            mine = [[each.pop(0) for _ in group] for each in sums]
            sizes = [parameter.sharded_size.numel() for parameter in group]
            whole = self._over_replicas(self._over_shards(mine, sum(sizes)), sum(sizes))
            for parameter, shard in zip(group, torch.split(whole, sizes), strict=True):
                gradient = parameter.to_sharded_dtensor(shard.view(parameter.sharded_size))
                parameter.sharded_param.grad = gradient

    def _over_shards(self, mine: list[list[Tensor]], size: int) -> SubtreeSums[Tensor]:
        """This rank's rows, `size` elements, of the sums over the slots of its replica. `mine` has
        the whole tensors of this rank's sums."""
        ranks = self.mesh.get_group("shard")
        shards = dist.get_world_size(ranks)
        first = dist.get_rank() - dist.get_rank(ranks)
        owned = [self._slots_of(first + shard) for shard in range(shards)]
        whole = [*chain(*mine)]
        parts = [[_rows(tensor, shard, shards) for tensor in whole] for shard in range(shards)]
        return exchanged(parts, owned, size, ranks, self.device)

    def _over_replicas(self, sums: SubtreeSums[Tensor], size: int) -> Tensor:
        """The sum of all slots, from those of each replica."""
        if "replicate" not in (self.mesh.mesh_dim_names or ()):
            return sums.whole()
        ranks = self.mesh.get_group("replicate")
        replicas = dist.get_world_size(ranks)
        shards = dist.get_world_size() // replicas
        owned = []
        for first in range(0, replicas * shards, shards):
            last = self._slots_of(first + shards - 1)
            owned.append(range(self._slots_of(first).start, last.stop))
        return summed_over_replicas(sums.values, owned, size, ranks, self.device)

    def _slots_of(self, rank: int) -> range:
        return slots_of(self.slots, rank, dist.get_world_size())


def taken(parameter: FSDPParam) -> Tensor:
    """The whole gradient that a backward without a reduction has left, in float32, which the
    parameter has no more; zeros where it took no part."""
    gradient = parameter.unsharded_accumulated_grad
    if gradient is None:  # of a type that is not reduced in another one
        gradient, parameter._unsharded_param.grad = parameter._unsharded_param.grad, None
    parameter.unsharded_accumulated_grad = None
    if gradient is None:
        return torch.zeros_like(parameter._unsharded_param, dtype=torch.float32)
    return gradient


def _rows(tensor: Tensor, shard: int, shards: int) -> Tensor:
    """The rows that `fully_shard` gives to one of several shards: as `torch.chunk`."""
    rows = -(-len(tensor) // shards)
    return tensor[shard * rows : (shard + 1) * rows]


def _add_each(earlier: list[Tensor], later: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(earlier, later)
    return earlier
