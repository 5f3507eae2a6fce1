"""Blocks that compute parts of their forward again in the backward, instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

Mode = Literal["full", "selective"]
"""full: a block keeps its input only. selective: what its matrices and attention returned, too, so
that nothing dear is computed twice."""

_Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]
"""For the forward, and for what is computed again."""
_ATEN = torch.ops.aten
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN._scaled_mm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    }
)
"""Operations whose results "selective" keeps: as in torchtitan, those that cost most."""


def checkpointed(
    mode: Mode, function: Callable[..., Tensor], *inputs: object, draws: bool
) -> Tensor:
    """`function` of these inputs, which alone are kept, or what `mode` says.

    Gradients are the same bits as without. `draws` is whether it uses random numbers, as dropout
    does: they are drawn again as they were.
    """
    from torch.utils.checkpoint import checkpoint  # its first call imports torch's compiler

    kept: dict[str, Any] = {} if mode == "full" else {"context_fn": _contexts}
    result: Tensor = checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=draws, **kept
    )
    return result


def _contexts() -> _Contexts:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    made: _Contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return made


def _policy(context: object, operation: object, *args: object, **kwargs: object) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = operation in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
