"""Sums over slots of the global batch that several ranks hold, in the order of
`model/spec/slot_tree.py`: what each rank of a group has summed is exchanged, and added up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kempner.model.spec.slot_tree import SubtreeSums, subtrees


def exchanged(
    parts: Sequence[Sequence[Tensor]],
    owned: Sequence[range],
    size: int,
    ranks: dist.ProcessGroup | None,
    device: torch.device,
) -> SubtreeSums[Tensor]:
    """What this rank of a group gets of all its ranks' subtrees, `size` elements of each, added up.

    Args:
        parts: for each rank of the group, what it gets of this one's subtrees, one after the other,
            in any number of pieces.
        owned: the slots of each rank of the group.
        ranks: the group; None for all.
    """
    known = [subtrees(slots) for slots in owned]
    given = [sum(piece.numel() for piece in part) for part in parts]
    nothing = torch.empty(0, device=device)  # all that a rank without slots has
    received = torch.cat([nothing, *(piece.flatten() for part in parts for piece in part)])
    if len(owned) > 1:
        taken_of = [size * len(each) for each in known]
        sent, received = received, received.new_empty(sum(taken_of))
        dist.all_to_all_single(received, sent, taken_of, given, group=ranks)
    sums = SubtreeSums[Tensor](Tensor.add_)
    numbered = enumerate(chain(*known))
    for number, subtree in sorted(numbered, key=lambda each: each[1].start):
        sums.push(subtree, received[number * size :][:size])
    return sums


def summed_over_replicas(
    values: Sequence[Tensor],
    owned: Sequence[range],
    size: int,
    ranks: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """The sum over all slots, `size` elements, on every rank of a group. Each adds up an equal part
    of it, and hands that to the others.

    Args:
        values: of this rank's largest complete subtrees, `size` elements each.
        owned: the slots of each rank of the group.
        ranks: the group; None for all.
    """
    replicas = len(owned)
    part = -(-size // replicas)
    filled = [F.pad(value, (0, part * replicas - size)) for value in values]
    parts = [[value[n * part :][:part] for value in filled] for n in range(replicas)]
    own = exchanged(parts, owned, part, ranks, device).whole()
    if replicas == 1:
        return own
    whole = own.new_empty(part * replicas)
    dist.all_gather_single(whole, own, group=ranks)
    return whole[:size]


def add_each(earlier: list[Tensor], later: list[Tensor]) -> list[Tensor]:
    """The sums of tensors and others, in the memory of the first."""
    torch._foreach_add_(earlier, later)
    return earlier


def sum_of_slots(values: Tensor) -> Tensor:
    """The sum of a vector, one element for each slot, along the tree."""
    values = F.pad(values, (0, (1 << (len(values) - 1).bit_length()) - len(values)))
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def take_gradient(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a plain parameter, which it has no more; zeros where it took no part."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return gradient.to(dtype)
