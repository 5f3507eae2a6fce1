"""A step's gradient and loss as sums over the slots of the global batch, in the order of
`model/spec/slot_tree.py`: the same bits on any number of data parallel ranks, replicated or
sharded.

FSDP reduces nothing here. Either once a step: after each backward this rank takes the whole
gradient of its slot and adds it to those of its largest complete subtrees; after the last one,
these are exchanged among the ranks that shard the parameters, of which each gets its own rows. Or
after every micro batch: these ranks take slots in turn, and in place of FSDP's reduce-scatter each
gets its own rows of the newest slots. At the end of the step replicas exchange their sums: each
gets an equal part, adds it up, and hands it to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kempner.checkpoint.tensors.state import is_sharded
from kempner.data.serve.loader import IGNORE, MicroBatch
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.model.spec.slot_tree import SubtreeSums, slots_of
from kempner.run.control.heartbeat import Waiting, untimed
from kempner.training.compute.forward_backward import set_rng, summed_loss
from kempner.training.compute.slot_exchange import (
    add_each,
    exchanged,
    sum_of_slots,
    summed_over_replicas,
    take_gradient,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@dataclass(frozen=True)
class Witness:
    """What a step's parts are shown to: of each slot its micro batch, loss and whole gradient; of
    all slots of a rank the number of valid tokens, and the sums that it sends."""

    slot: Callable[[MicroBatch, Tensor, Sequence[Tensor]], None]
    tokens: Callable[[Tensor], None]
    sums: Callable[[Sequence[Sequence[Tensor]]], None]


@dataclass(frozen=True)
class SlotGradient:
    """As `StepGradient`, of a model that `fully_shard` has sharded over `mesh`: shards, or replicas
    and shards, of all ranks; or of a plain model where that is one rank. `slots` is their number in
    the global batch. What dropout draws follows from the slot. Every rank passes as many micro
    batches; those behind its last slot do not count."""

    model: nn.Module
    device: torch.device
    seed: int
    slots: int
    mesh: DeviceMesh
    choice: Choice = EACH_MICRO_BATCH
    waiting: Waiting = untimed

    def add(
        self, micro_batches: Sequence[MicroBatch], step: int, witness: Witness | None = None
    ) -> Tensor:
        """The loss of the step whose gradient becomes that of the parameters; as
        `StepGradient.add`. Slots that are taken in turn have no `witness`."""
        losses, valid, sums = self._sum_slots(micro_batches, step, dist.get_rank(), witness)
        with self.waiting("the exchange of gradients"):
            self.exchange(sums)
        with self.waiting("the sum of losses"):
            dist.all_reduce(losses)  # of one rank each, and zero on all others
        return (sum_of_slots(losses) / valid)[None]

    def again(
        self,
        micro_batches: Sequence[MicroBatch],
        step: int,
        parts: Sequence[int],
        witness: Witness | None,
    ) -> list[Tensor]:
        """The gradient again, where rank r takes the part of rank `parts[r]`, whose `micro_batches`
        it passes: that rank's shards, in the order of `trained`. Nothing else changes. The shards
        are exchanged between all ranks at once, whatever the mesh; not for slots that are taken in
        turn."""
        assert self._turn[1] == 1
        reduced = self.take() if self.root is None else []  # a backward would add to it
        _, _, sums = self._sum_slots(micro_batches, step, parts[dist.get_rank()], witness)
        if self.root is None:
            self._give(reduced)
            return sums.whole()
        shards = self.shards
        own = parts[dist.get_rank()] % shards
        owned = [self._slots_of(part) for part in parts]
        found, values = list[Tensor](), sums.values
        for group in map(trained, self._groups):
            whole = [each.pop(0) for each in values for _ in group]
            shapes = [shard_shape(p.sharded_param.shape, own, shards) for p in group]
            sizes = [shape.numel() for shape in shapes]
            pieces = [[_rows(tensor, part % shards, shards) for tensor in whole] for part in parts]
            with self.waiting("the exchange of gradients"):
                total = exchanged(pieces, owned, sum(sizes), None, self.device)
            split = torch.split(total.whole(), sizes)
            found += [flat.view(shape) for flat, shape in zip(split, shapes, strict=True)]
        return found

    def added_up_by(self, rank: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """What a rank adds up for its replicas of its shard of the gradient, which is given in the
        order of `trained`: of each group of parameters a vector, copied; none without replicas."""
        replicas, replica = dist.get_world_size() // self.shards, rank // self.shards
        if replicas == 1:
            return []
        left, found = iter(gradients), list[Tensor]()
        for group in self._groups:
            flat = torch.cat([next(left).reshape(-1) for _ in trained(group)])
            part = -(-len(flat) // replicas)
            found.append(flat[replica * part :][:part].clone())
        return found

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that have a gradient."""
        if self.root is None:
            return [each for each in self.model.parameters() if each.requires_grad]
        return [parameter.sharded_param for parameter in chain(*map(trained, self._groups))]

    @property
    def shard_ranks(self) -> dist.ProcessGroup:
        """The ranks that hold the parameters between them."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    def _sum_slots(
        self,
        micro_batches: Sequence[MicroBatch],
        step: int,
        part: int,
        witness: Witness | None,
    ) -> tuple[Tensor, Tensor, SubtreeSums[list[Tensor]]]:
        """Forward and backward of the slots of one rank: the loss of each, the number of valid
        tokens of all ranks, and the sums of this rank's gradients."""
        own, (turn, turns) = self._slots_of(part), self._turn
        valid = self._count_tokens(micro_batches, witness)
        losses = torch.zeros(self.slots, device=self.device)
        sums = SubtreeSums[list[Tensor]](add_each)
        sharded, in_turn = self.root, self._in_turn
        if sharded is not None:
            sharded.set_requires_gradient_sync(turns > 1)
            sharded.set_requires_all_reduce(False)
        for number, micro_batch in enumerate(micro_batches):
            slot = own.start + number * turns + turn
            for exchange in in_turn:
                exchange.slots = own[number * turns :][:turns]
            set_rng(self.seed, step, slot, 0)
            last = number == len(micro_batches) - 1
            if sharded is not None:
                sharded.set_reshard_after_backward(last or not self.choice.keep_parameters)
            loss = summed_loss(self.model, micro_batch, self.device)
            (loss / valid).backward()  # type: ignore[no-untyped-call]
            gradients = [] if turns > 1 else self.take()
            if slot not in own:
                continue
            losses[slot] = loss.detach()
            if witness is not None:
                witness.slot(micro_batch, loss.detach(), gradients)
            if turns == 1:
                sums.push(range(slot, slot + 1), gradients)
        if witness is not None:
            witness.sums(sums.values)
        return losses, valid, sums

    def take(self) -> list[Tensor]:
        """The whole gradients that the newest backward has left, which the parameters no more have:
        it was told not to reduce them."""
        if self.root is None:
            return [take_gradient(parameter, torch.float32) for parameter in self.trained]
        return [taken(parameter) for parameter in chain(*map(trained, self._groups))]

    def _give(self, gradients: Sequence[Tensor]) -> None:
        """Give plain parameters their gradients."""
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient

    def _count_tokens(self, micro_batches: Sequence[MicroBatch], witness: Witness | None) -> Tensor:
        targets = [batch.targets.to(self.device, non_blocking=True) for batch in micro_batches]
        valid = torch.stack([(each != IGNORE).sum() for each in targets]).sum()
        if witness is not None:
            witness.tokens(valid.clone())
        with self.waiting("the count of tokens"):
            dist.all_reduce(valid)  # an integer: in any order
        return valid.clamp(min=1).float()

    @cached_property
    def shards(self) -> int:
        """The ranks of a replica."""
        return dist.get_world_size(self.shard_ranks)

    @cached_property
    def root(self) -> FSDPModule | None:
        """None where a rank is alone and has plain parameters."""
        if not any(map(is_sharded, self.model.parameters())):
            return None
        from torch.distributed.fsdp import FSDPModule  # a rank that is alone is spared it

        assert isinstance(self.model, FSDPModule)
        return self.model

    @cached_property
    def _groups(self) -> list[FSDPParamGroup]:
        return groups_of(self.model)

    @cached_property
    def _turn(self) -> tuple[int, int]:
        """This rank's turn among those that take slots in turn, and how many these are."""
        turns = self.choice.turns(self.shards)
        return dist.get_rank() % turns, turns

    @cached_property
    def _in_turn(self) -> list[SumsInTurn]:
        """Of each group, in place of its reduce-scatter; none if slots are not taken in turn."""
        if self._turn[1] == 1:
            return []
        exchanges = [SumsInTurn(self.waiting) for _ in self._groups]
        for group, exchange in zip(self._groups, exchanges, strict=True):
            group._reduce_scatter_comm = cast("ReduceScatter", exchange)
        return exchanges

    def exchange(self, own: SubtreeSums[list[Tensor]]) -> None:
        """Give the parameters this rank's shard of the whole sum. `own` has the whole tensors of
        this rank's sums, unless slots were taken in turn; they are emptied on the way."""
        if self.root is None:
            self._give(own.whole())
            return
        kept = own.values
        for number, group in enumerate(self._groups):
            parameters = trained(group)
            if self._in_turn:
                sums = self._in_turn[number].take()
                group._partial_reduce_output = None  # what replicas would add up once a step
                sizes = [each.padded_sharded_param_size.numel() for each in parameters]
            else:
                mine = [[each.pop(0) for _ in parameters] for each in kept]
                sizes = [each.sharded_size.numel() for each in parameters]
                sums = self._over_shards(mine, sum(sizes))
            whole = torch.split(self._over_replicas(sums, sum(sizes)), sizes)
            for parameter, piece in zip(parameters, whole, strict=True):
                shard = piece[: parameter.sharded_size.numel()].view(parameter.sharded_size)
                trains = parameter.sharded_param
                trains.grad = parameter.to_sharded_dtensor(shard.to(trains.dtype))

    def _over_shards(self, mine: list[list[Tensor]], size: int) -> SubtreeSums[Tensor]:
        """This rank's rows, `size` elements, of the sums over the slots of its replica. `mine` has
        the whole tensors of this rank's sums."""
        ranks, shards = self.shard_ranks, self.shards
        first = dist.get_rank() - dist.get_rank(ranks)
        owned = [self._slots_of(first + shard) for shard in range(shards)]
        whole = [*chain(*mine)]
        parts = [[_rows(tensor, shard, shards) for tensor in whole] for shard in range(shards)]
        return exchanged(parts, owned, size, ranks, self.device)

    def _over_replicas(self, sums: SubtreeSums[Tensor], size: int) -> Tensor:
        """The sum of all slots, from those of each replica."""
        if self.mesh.ndim == 1:
            return sums.whole()
        ranks = self.mesh.get_group(0)
        replicas = dist.get_world_size(ranks)
        owned = [slots_of(self.slots, replica, replicas) for replica in range(replicas)]
        return summed_over_replicas(sums.values, owned, size, ranks, self.device)

    def _slots_of(self, rank: int) -> range:
        """The slots of a rank, or of those with which it takes them in turn."""
        turns = self._turn[1]
        return slots_of(self.slots, rank // turns, dist.get_world_size() // turns)


def _nothing() -> SubtreeSums[Tensor]:
    return SubtreeSums(Tensor.add_)


@dataclass
class SumsInTurn:
    """In place of the reduce-scatter of a group of parameters, with the signature that FSDP calls:
    this rank's rows of the newest slots' gradients, added to those of the slots before."""

    waiting: Waiting
    slots: range = range(0)
    """The newest ones: the first is that of the first rank."""
    sums: SubtreeSums[Tensor] = field(default_factory=_nothing)

    def take(self) -> SubtreeSums[Tensor]:
        """The sums of a step, which begins anew."""
        taken, self.sums = self.sums, _nothing()
        return taken

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        received, newest = torch.empty_like(input_tensor), _nothing()
        with self.waiting("the exchange of gradients"):
            dist.all_to_all_single(received, input_tensor, group=group)
        of_ranks = received.view(dist.get_world_size(group), -1)[: len(self.slots)]
        for slot, gradient in zip(self.slots, of_ranks, strict=True):
            newest.push(range(slot, slot + 1), gradient)
        for subtree, value in newest.kept:
            self.sums.push(subtree, value.clone())  # or all that was received would stay
        output_tensor.zero_()  # what the parameters have until the step's last exchange


def groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """The groups in which `fully_shard` gathers parameters, those that have some that train."""
    from torch.distributed.fsdp import FSDPModule

    modules = (m for m in model.modules() if isinstance(m, FSDPModule))
    groups = (g for m in modules for g in m._get_fsdp_state()._fsdp_param_groups)
    # Modules that are gathered together have the same group.
    return [group for group in dict.fromkeys(groups) if trained(group)]


def trained(group: FSDPParamGroup) -> list[FSDPParam]:
    return [each for each in group.fsdp_params if each.sharded_param.requires_grad]


def taken(parameter: FSDPParam) -> Tensor:
    """The whole gradient that a backward without a reduction has left, in the type in which it
    would be reduced, and which the parameter has no more; zeros where it took no part."""
    gradient = parameter.unsharded_accumulated_grad
    if gradient is None and hasattr(parameter, "_unsharded_param"):  # gathered; of that type
        gradient, parameter._unsharded_param.grad = parameter._unsharded_param.grad, None
    parameter.unsharded_accumulated_grad = None
    if gradient is None:
        of = parameter.sharded_param
        return torch.zeros(of.shape, dtype=torch.float32, device=of.device)
    return gradient


def _rows(tensor: Tensor, shard: int, shards: int) -> Tensor:
    """The rows that `fully_shard` gives to one of several shards: as `torch.chunk`."""
    rows = -(-len(tensor) // shards)
    return tensor[shard * rows : (shard + 1) * rows]


def shard_shape(shape: Sequence[int], shard: int, shards: int) -> torch.Size:
    """The shape that `fully_shard` gives to a shard of a tensor of this shape."""
    rows = -(-shape[0] // shards)
    return torch.Size((max(0, min(rows, shape[0] - shard * rows)), *shape[1:]))
