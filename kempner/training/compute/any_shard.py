"""Operations whose bits do not depend on how tensors are sharded by rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_VECTOR = 16
"""Elements, at least as many as the widest instruction of a processor takes of float32."""
_LOWEST = -149
"""No finite float32 is m 2^e, 1/2 <= m < 1, with a smaller e."""
_EXPONENTS = 128 - _LOWEST + 1
_MANTISSA = 24


@contextmanager
def whole_vectors(*columns: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """The same elements for a kernel that works on each by itself, with every tensor's length a
    multiple of 16; what the kernel changes is changed in `columns`.

    On CPUs such kernels compute the last elements of a tensor, which fill no vector, by other
    instructions with other roundings. Here these are put together, one tensor's after the other's,
    each filled up with zeros; they come last, and only if there are any. The tensors of a column
    are contiguous, and as long as those of the others.
    """
    ends = [tensor.numel() // _VECTOR * _VECTOR for tensor in columns[0]]
    over = [n for n, tensor in enumerate(columns[0]) if tensor.numel() > ends[n]]
    flat = [[tensor.view(-1) for tensor in column] for column in columns]
    given = [[x[:end] for x, end in zip(column, ends, strict=True)] for column in flat]
    if not over:
        yield given
        return
    left = [[column[n][ends[n] :] for n in over] for column in flat]
    filled = [torch.stack([F.pad(x, (0, _VECTOR - len(x))) for x in tails]) for tails in left]
    yield [[*column, tails] for column, tails in zip(given, filled, strict=True)]
    for tails, rows in zip(left, filled, strict=True):
        torch._foreach_copy_(tails, [row[: len(x)] for row, x in zip(rows, tails, strict=True)])


def exact_norm(shards: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """The norm of all elements of tensors that the ranks of a group share by rows, or that are
    whole (None); a float32 scalar, not finite if one of their squares in float32 is not.

    The squares of a row are added in the fixed order of `fold`, rows as integers: mantissas of 24
    bits, one sum of 63 bits for each exponent. Those are exact, up to 2^39 rows.
    """
    # The last element counts the rows that are not finite.
    sums = torch.zeros(_EXPONENTS + 1, dtype=torch.int64, device=shards[0].device)
    for shard in shards:
        rows = shard.detach().float().square()
        rows = fold(rows.view(len(rows) if rows.ndim else 1, -1)) if rows.numel() else rows
        finite = torch.isfinite(rows)
        mantissas, exponents = torch.frexp(rows.where(finite, 0.0))
        numbers = (mantissas * 2.0**_MANTISSA).to(torch.int64)
        sums.index_add_(0, exponents.to(torch.int64).flatten() - _LOWEST, numbers.flatten())
        sums[-1] += finite.logical_not().sum()
    if group is not None:
        dist.all_reduce(sums, group=group)
    units = torch.arange(_LOWEST, _LOWEST + _EXPONENTS, dtype=torch.float64, device=sums.device)
    terms = torch.ldexp(sums[:-1].double(), units - _MANTISSA)
    norm = fold(terms[None])[0].sqrt().float()
    return norm.where(sums[-1] == 0, torch.inf)


def fold(rows: Tensor) -> Tensor:
    """The sum of each row, [n, width] to [n]: its right half is added to the left one, element by
    element, until one is left. Overwrites `rows`."""
    while (width := rows.shape[1]) > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:]
        rows = rows[:, :half]
    return rows[:, 0]
