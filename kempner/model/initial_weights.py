"""The weights that a model starts from.

They are the same bits for every world size and sharding: every parameter is cut into blocks of
rows, whose numbers come from a generator of their own, seeded by (seed, parameter name, block), so
that a rank makes only the blocks that its shard touches and needs nothing from the others. Bits
agree between machines of one processor type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kempner.model.spec.adapter import A, B
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
    Of an adapter the first matrices are uniform as in PEFT (Kaiming's, with a = sqrt(5)), and the
    second ones 0. Parameters that do not train stay what they are.
    Parameters may be plain or `DTensor`s of any placement but partial, their storage allocated.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            local, offsets = _local_part(parameter)
            draw = _draw(name, parameter.shape, model.shape.n_layers)
            if isinstance(draw, float):
                local.fill_(draw)
            else:
                _fill(local, offsets, parameter.shape, draw, (seed, name))
    fill_rotary(model)


def fill_rotary(model: Transformer) -> None:
    """Fill the table of positions, the one buffer; a checkpoint does not have it."""
    shape = model.shape
    table = rotary_table(shape.head_dim, shape.max_seq_len, shape.rope_theta, shape.rope_scaling)
    with torch.no_grad():
        model.rotary.copy_(table)


Draw = Callable[[Tensor, torch.Generator], object]
"""Fills a tensor with random numbers, in place."""


def _draw(name: str, shape: torch.Size, n_layers: int) -> Draw | float:
    """What a parameter's initial values are drawn by; the value, where all are the same."""
    if name.endswith("norm.weight"):
        return 1.0
    if name.endswith(B):
        return 0.0
    if name.endswith(A):
        bound = 1 / math.sqrt(shape[1])
        return lambda values, generator: values.uniform_(-bound, bound, generator=generator)
    residual = name.endswith(("attention.wo.weight", "ffn.w2.weight"))
    std = STD / math.sqrt(2 * n_layers) if residual else STD
    return lambda values, generator: values.normal_(0.0, std, generator=generator)


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
    draw: Draw,
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
        draw(values, _generator(*key, block))
        low, high = max(first, top), min(end, top + rows)
        local[low - first : high - first].copy_(values[(slice(low - top, high - top), *inner)])


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    # Bit 63 stays clear: manual_seed maps what exceeds a signed 64-bit integer.
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
