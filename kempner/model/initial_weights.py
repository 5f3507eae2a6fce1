"""The weights that a model starts from.

They are the same bits for every world size and sharding: every parameter is cut into blocks of
rows, whose numbers come from a generator of their own, seeded by (seed, parameter name, block), so
that a rank makes only the blocks that its shard touches and needs nothing from the others. Bits
agree between machines of one processor type.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kempner.model.transformer import Transformer, rotary_table

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


BLOCK_ROWS = 64
STD = 0.02


def initialise(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer of a model in place.

    Matrices are normal with standard deviation 0.02; those that write to the residual stream
    (`attention.wo`, `ffn.w2`) have it divided by sqrt(2 * n_layers) (Radford et al., "Language
    Models are Unsupervised Multitask Learners", section 2.3), norms are 1.
    Parameters may be plain or `DTensor`s of any placement but partial, their storage allocated.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local, offsets = _local_part(parameter)
            std = _std(name, model.shape.n_layers)
            if std is None:
                local.fill_(1.0)
            else:
                _fill(local, offsets, parameter.shape, std, (seed, name))
    fill_rotary(model)


def fill_rotary(model: Transformer) -> None:
    """Fill the table of positions, the one buffer; a checkpoint does not have it."""
    shape = model.shape
    table = rotary_table(shape.head_dim, shape.max_seq_len, shape.rope_theta, shape.rope_scaling)
    with torch.no_grad():
        model.rotary.copy_(table)


def _std(name: str, n_layers: int) -> float | None:
    """Standard deviation of a parameter's initial values; None for norms, which are all 1."""
    if name.endswith("norm.weight"):
        return None
    if name.endswith(("attention.wo.weight", "ffn.w2.weight")):
        return STD / math.sqrt(2 * n_layers)
    return STD


def _local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter, and where in the whole it begins."""
    if not hasattr(parameter, "__create_chunk_list__"):  # only a DTensor has it
        return parameter, (0,) * parameter.ndim
    (chunk,) = parameter.__create_chunk_list__()
    return cast("DTensor", parameter).to_local(), tuple(chunk.offsets)


def _fill(
    local: Tensor,
    offsets: tuple[int, ...],
    whole: torch.Size,
    std: float,
    key: tuple[int, str],
) -> None:
    """Fill a shard in place, block of rows by block of rows; `offsets` are where it begins in the
    parameter of shape `whole`, one per dimension, and `key` is (seed, parameter name)."""
    if local.numel() == 0:
        return
    first, end = offsets[0], offsets[0] + local.shape[0]
    inner = tuple(
        slice(offset, offset + size)
        for offset, size in zip(offsets[1:], local.shape[1:], strict=True)
    )
    for block in range(first // BLOCK_ROWS, -(-end // BLOCK_ROWS)):
        top = block * BLOCK_ROWS
        rows = min(BLOCK_ROWS, whole[0] - top)
        values = torch.empty((rows, *whole[1:]), dtype=torch.float32, device="cpu")
        values.normal_(0.0, std, generator=_generator(*key, block))
        low, high = max(first, top), min(end, top + rows)
        local[low - first : high - first].copy_(values[(slice(low - top, high - top), *inner)])


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    # Bit 63 stays clear: manual_seed maps what exceeds a signed 64-bit integer.
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
