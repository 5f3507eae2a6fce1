"""Matrix products of the blocks in eight bits, with torchao."""

from __future__ import annotations

import torch

from kempner.model.transformer import Transformer
from kempner.run.process.exit_codes import UsageError

_MULTIPLE = 16
"""What the widths of a product must be multiples of (`torch._scaled_mm`)."""
_CAPABILITY = (8, 9)
"""The first GPUs that multiply float8: Ada, Hopper."""


def use_float8(
    model: Transformer, device: torch.device, tokens: int, emulate: bool = False
) -> None:
    """Have every linear layer of the blocks round what it multiplies to float8.

    Each tensor is scaled by its largest element (Micikevicius et al., "FP8 Formats for Deep
    Learning", arXiv:2209.05433). Parameters stay as they are, and so do their names; embedding,
    output and attention are as ever.

    Args:
        model: not sharded yet; on the meta device.
        device: where it will be.
        tokens: of a micro batch.
        emulate: round, but multiply in a wider type, as any device can.

    Raises `UsageError` if torchao is missing, or device or sizes cannot do it.
    """
    if not emulate:
        _refuse(model, device, tokens)
    try:
        from torchao.float8 import (  # type: ignore[import-untyped]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError:
        raise UsageError(
            "train.fp8 needs the package torchao: pip install 'kempner[fp8]'"
        ) from None
    convert_to_float8_training(model.layers, config=Float8LinearConfig(emulate=emulate))


def _refuse(model: Transformer, device: torch.device, tokens: int) -> None:
    if device.type != "cuda":
        raise UsageError("train.fp8 needs a GPU; remove it, or train on one")
    if (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        raise UsageError(
            f"train.fp8 needs a GPU that multiplies float8, of compute capability "
            f"{'.'.join(map(str, _CAPABILITY))} or later; "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}: remove it"
        )
    shape = model.shape
    widths = {
        "model.dim": shape.dim,
        "the width of all query heads": shape.q_dim,
        "the width of all key heads": shape.kv_dim,
        "model.ffn_dim": shape.ffn_dim,
        "train.micro_batch_size * train.seq_len": tokens,
    }
    for name, width in widths.items():
        if width % _MULTIPLE:
            raise UsageError(
                f"train.fp8 needs multiples of {_MULTIPLE}, and {name} is {width}: "
                "change it, or remove train.fp8"
            )
