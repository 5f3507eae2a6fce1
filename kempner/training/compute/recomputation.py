"""Computes a step again on other ranks, and remembers what this rank has left in its memory.

In a step that is checked, rank r + hop also takes the part of rank r, with samples that it reads by
itself. Fingerprints of both are compared: before the update those of inputs, losses, gradients of
slots, and of what is sent and received; after it those of weights and moments. Where two ranks
differ, a third one takes the part, or with two ranks both take it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.tensors.state import INTEGERS, local_part
from kempner.data.serve.loader import MicroBatch
from kempner.model.spec.slot_tree import slots_of
from kempner.training.compute.any_shard import exact_norm
from kempner.training.compute.fingerprint import fingerprint, name_key
from kempner.training.compute.optimizer import GuardedAdamW, GuardedSGD, clip_to, found_inf
from kempner.training.compute.slot_gradient import SlotGradient, Witness, shard_shape
from kempner.training.corruption import Claim, CorruptionVerdict, StepPart, judge

ReadPart = Callable[[int], Sequence[MicroBatch]]
"""The micro batches of the step of a rank, read anew."""

Columns = list[list[Tensor]]
"""As `GuardedAdamW.columns`: several tensors of each parameter of a group."""


class StateChain:
    """Tells whether weights and moments in this rank's memory are as it has left them. One bit that
    flips is always found: on CPUs by xxh3, on GPUs by the sum of each tensor's words, in which two
    flips of one tensor can cancel each other."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._known: int | Tensor | None = None
        self._tensors: list[Tensor] = []
        self._count = -1

    def remember(self) -> None:
        """Note the bits as they are; call after each update, and after a load."""
        if self._count != len(self._optimizer.state):  # state appears in the first step
            self._gather()
        self._known = self._digest()

    def forget(self) -> None:
        """Before other tensors take the place of these."""
        self._known, self._count = None, -1

    @property
    def broken(self) -> bool:
        """Whether a bit differs from what was noted last; waits for the device."""
        if self._known is None:
            return False
        now = self._digest()
        if isinstance(now, Tensor):
            return not torch.equal(now, cast(Tensor, self._known))
        return now != self._known

    @property
    def noted(self) -> int:
        """A hash of what was noted last, 64 bits, which replicas have in common."""
        known = self._known
        if isinstance(known, Tensor):
            return _signed(xxhash.xxh3_64(known.cpu().numpy().data))
        return known or 0

    def _gather(self) -> None:
        states = (s for state in self._optimizer.state.values() for s in state.values())
        held = [*self._model.parameters(), *(s for s in states if isinstance(s, Tensor))]
        flat = (local_part(tensor).reshape(-1) for tensor in held)
        self._tensors = [tensor.view(INTEGERS[tensor.element_size()]) for tensor in flat]
        self._count = len(self._optimizer.state)

    def _digest(self) -> int | Tensor:
        if self._tensors[0].is_cuda:
            return torch.stack([tensor.sum(dtype=torch.int64) for tensor in self._tensors])
        hashed = xxhash.xxh3_64()
        for tensor in self._tensors:
            hashed.update(tensor.numpy().data)
        return _signed(hashed)


def _signed(hashed: xxhash.xxh3_64) -> int:
    """As int64."""
    return int.from_bytes(hashed.digest(), "big", signed=True)


@dataclass
class _Prints:
    """Fingerprints of one rank's part of a step, int64 scalars."""

    device: torch.device
    tokens: Tensor | None = None
    sums: Tensor | None = None
    slots: list[Tensor] = field(default_factory=list)

    @property
    def witness(self) -> Witness:
        return Witness(self._see_slot, self._see_tokens, self._see_sums)

    def _see_slot(self, micro_batch: MicroBatch, loss: Tensor, gradients: Sequence[Tensor]) -> None:
        inputs = [tensor for tensor in micro_batch if tensor is not None]
        self.slots += [_print_of(inputs).to(self.device), _print_of([loss, *gradients])]

    def _see_tokens(self, count: Tensor) -> None:
        self.tokens = count

    def _see_sums(self, sums: Sequence[Sequence[Tensor]]) -> None:
        flat = [tensor for each in sums for tensor in each]
        self.sums = _print_of(flat) if flat else torch.zeros((), dtype=torch.int64).to(self.device)

    def vector(self, portion: Sequence[Tensor], gradient: Sequence[Tensor], length: int) -> Tensor:
        """[4 + 2 x `length`] on the CPU, with the slots that there are not as zeros."""
        nothing = torch.zeros((), dtype=torch.int64, device=self.device)
        assert self.tokens is not None
        assert self.sums is not None
        missing = [nothing] * (2 * length - len(self.slots))
        results = _print_of(portion) if portion else nothing, _print_of(gradient)
        parts = [self.tokens, self.sums, *results, *self.slots, *missing]
        return torch.stack(parts).cpu()


class Recomputation:
    """Checks steps of `gradient` and `optimizer`, on all ranks together.

    Rank r is checked by rank r + `hop`, on another node if there is one. `votes` is a group of all
    ranks for tensors on the CPU.
    """

    def __init__(
        self, gradient: SlotGradient, optimizer: Optimizer, votes: dist.ProcessGroup, hop: int
    ) -> None:
        assert isinstance(optimizer, GuardedAdamW | GuardedSGD)
        self._gradient, self._optimizer, self._votes = gradient, optimizer, votes
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.hop = hop % self._world
        self._seen: _Prints | None = None
        self._kept: tuple[list[Columns], list[Tensor]] | None = None

    def watch(self) -> Witness:
        """What `SlotGradient.add` is to be given in a step that will be checked. A step without it
        can be checked, too, but a rank that lied in it only once is not named."""
        self._seen = _Prints(self._gradient.device)
        return self._seen.witness

    def forget(self) -> None:
        """Of a step that is not watched."""
        self._seen = None

    def check_gradient(self, step: int, read: ReadPart) -> CorruptionVerdict | None:
        """Compute the gradient of the step again, before the update, and judge."""
        own = [_gradient_of(parameter) for parameter in self._gradient.trained]
        watched = self._seen is not None
        if self._seen is not None:
            claims = self._claims(0, self._vector(0, self._seen, own))
        else:
            claims = self._claims_of(StepPart.GRADIENT, 0, _print_of(own))
        self._seen = None
        again = self._again(step, self.hop, read, claims)
        verdict = judge(claims, self._gradient.shards)
        for shift in self._arbiters:
            if verdict is None or verdict.sure:
                break
            self._again(step, shift, read, claims)
            verdict = judge(claims, self._gradient.shards)
        self._kept = None
        if verdict is None:
            self._kept = self._sent(self._columns(), self.hop, self.hop), again
        elif verdict.part is StepPart.GRADIENT and not watched:
            return replace(verdict, sure=False)  # it may have received something wrong
        return verdict

    def check_update(self, loss: Tensor, max_norm: float) -> CorruptionVerdict | None:
        """Update again what `check_gradient` found, after the update by the step's `loss`, and
        judge; arguments as those of `kempner.training.compute.optimizer.update`."""
        assert self._kept is not None
        (before, gradients), self._kept = self._kept, None
        made = [tensor for columns in self._columns() for column in columns for tensor in column]
        claims = self._claims_of(StepPart.UPDATE, 0, _print_of(made))
        made_again = self._updated(before, gradients, loss, max_norm)
        claims += self._claims_of(StepPart.UPDATE, self.hop, made_again)
        verdict = judge(claims, self._gradient.shards)
        for shift in self._arbiters:
            if verdict is None or verdict.sure:
                break
            by = (shift - self.hop) % self._world
            theirs = self._sent(before, by, shift)
            shards = self._moved(gradients, self._gradient.trained, by, shift)
            made_again = self._updated(theirs, shards, loss, max_norm)
            claims += self._claims_of(StepPart.UPDATE, shift, made_again)
            verdict = judge(claims, self._gradient.shards)
        return verdict

    @property
    def _arbiters(self) -> list[int]:
        """By how many ranks to shift the parts, one after the other, once two ranks differ."""
        if self._world <= 2:
            return [0, self.hop][: self._world]
        second = 2 * self.hop % self._world
        return [second or self.hop + 1]

    @property
    def _most(self) -> int:
        """The most slots of a rank."""
        return -(-self._gradient.slots // self._world)

    def _again(self, step: int, shift: int, read: ReadPart, claims: list[Claim]) -> list[Tensor]:
        """Compute the gradient again, where each rank takes the part of the one `shift` before it;
        adds to `claims`."""
        parts, prints = self._parts(shift), _Prints(self._gradient.device)
        mine = read(parts[self._rank])
        found = self._gradient.again(mine, step, parts, prints.witness)
        claims += self._claims(shift, self._vector(shift, prints, found))
        return found

    def _vector(self, shift: int, prints: _Prints, gradient: Sequence[Tensor]) -> Tensor:
        """Of the part of the rank `shift` before this one, as `_claims` takes it."""
        portion = self._gradient.added_up_by(self._parts(shift)[self._rank], gradient)
        return prints.vector(portion, gradient, self._most)

    def _parts(self, shift: int) -> list[int]:
        return [(rank - shift) % self._world for rank in range(self._world)]

    def _claims(self, shift: int, vector: Tensor) -> list[Claim]:
        """The claims of all ranks about the parts that they took."""
        claims = []
        for by, (of, values) in enumerate(
            zip(self._parts(shift), self._gathered(vector), strict=True)
        ):
            parts = (StepPart.TOKENS, StepPart.SUM, StepPart.PORTION, StepPart.GRADIENT)
            claims += [Claim(part, of, by, v) for part, v in zip(parts, values, strict=False)]
            for number, slot in enumerate(slots_of(self._gradient.slots, of, self._world)):
                inputs, result = values[4 + 2 * number :][:2]
                claims.append(Claim(StepPart.INPUTS, of, by, inputs, slot))
                claims.append(Claim(StepPart.SLOT, of, by, result, slot))
        return claims

    def _claims_of(self, part: StepPart, shift: int, value: Tensor) -> list[Claim]:
        part_values = zip(self._parts(shift), self._gathered(value.cpu()[None]), strict=True)
        return [Claim(part, of, by, value) for by, (of, (value,)) in enumerate(part_values)]

    def _gathered(self, vector: Tensor) -> list[list[int]]:
        vectors = [torch.empty_like(vector) for _ in range(self._world)]
        dist.all_gather(vectors, vector, group=self._votes)
        return [each.tolist() for each in vectors]

    @cached_property
    def _groups(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """The groups of the optimizer, with those of their parameters that move."""
        trained = {id(parameter) for parameter in self._gradient.trained}
        groups = self._optimizer.param_groups
        return [(group, [p for p in group["params"] if id(p) in trained]) for group in groups]

    def _columns(self) -> list[Columns]:
        return [self._optimizer.columns(moved) for _, moved in self._groups]

    def _sent(self, columns: list[Columns], by: int, shift: int) -> list[Columns]:
        """What the rank `by` ranks before this one has in the place of `columns`, which is of the
        part of the rank `shift` before this one; copies."""
        return [
            [self._moved(column, moved, by, shift) for column in each]
            for each, (_, moved) in zip(columns, self._groups, strict=True)
        ]

    def _moved(
        self, tensors: Sequence[Tensor], parameters: Sequence[Tensor], by: int, shift: int
    ) -> list[Tensor]:
        """As `_sent`, of one tensor of each of some parameters, a shard or a number."""
        shards = self._gradient.shards
        own = self._parts(shift)[self._rank] % shards
        shapes = [
            shard_shape(whole.shape, own, shards) if tensor.ndim else tensor.shape
            for tensor, whole in zip(tensors, parameters, strict=True)
        ]
        if not tensors:
            return []
        sizes = [shape.numel() for shape in shapes]
        sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if by:
            into, out = [0] * self._world, [0] * self._world
            out[(self._rank + by) % self._world] = sent.numel()
            into[(self._rank - by) % self._world] = sum(sizes)
            received = sent.new_empty(sum(sizes))
            dist.all_to_all_single(received, sent, into, out)
            sent = received
        split = torch.split(sent, sizes)
        return [flat.view(shape) for flat, shape in zip(split, shapes, strict=True)]

    def _updated(
        self,
        before: list[Columns],
        gradients: Sequence[Tensor],
        loss: Tensor,
        max_norm: float,
    ) -> Tensor:
        """The fingerprint of what a step makes of copies of these."""
        scaled = [gradient.clone() for gradient in gradients]
        norm = exact_norm(scaled, self._gradient.shard_ranks)
        clip_to(scaled, norm, max_norm)
        self._optimizer.found_inf = found_inf(loss, norm)
        by_parameter = dict(zip(map(id, self._gradient.trained), scaled, strict=True))
        made = []
        for (group, moved), columns in zip(self._groups, before, strict=True):
            copies = [[tensor.clone() for tensor in column] for column in columns]
            if moved:
                self._optimizer.move(group, [by_parameter[id(p)] for p in moved], copies)
            made += [tensor for column in copies for tensor in column]
        return _print_of(made)


def _gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # every slot's is there, if only as zeros
    return local_part(parameter.grad)


def _print_of(tensors: Sequence[Tensor]) -> Tensor:
    """One fingerprint of several tensors, by their order."""
    parts = torch.stack([fingerprint(tensor) for tensor in tensors])
    return parts.mul_(_keys(len(tensors), parts.device)).sum()


@lru_cache(64)
def _keys(count: int, device: torch.device) -> Tensor:
    numbers = [name_key(str(number)) for number in range(count)]
    return torch.tensor(numbers, dtype=torch.int64, device=device)
