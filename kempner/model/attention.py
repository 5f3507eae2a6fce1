"""Causal attention, in whole sequences or within their documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mask: TypeAlias = "Tensor | BlockMask"
"""Who sees whom: bool, [batch, 1, seq, seq]; or the same for FlexAttention, by blocks."""


def document_mask(tokens: Tensor, end: int) -> Mask:
    """A token sees itself and what comes before it in its document, as in Llama 3.

    FlexAttention, which skips what nobody sees, where it has a backward: on CUDA. Elsewhere a
    mask of all pairs.

    Args:
        tokens: int64, [batch, seq].
        end: the token that ends a document, and belongs to it.
    """
    numbers = _document_numbers(tokens, end)
    if tokens.device.type == "cuda":
        return block_mask(numbers)
    return (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()


def _document_numbers(tokens: Tensor, end: int) -> Tensor:
    """How many documents have ended before each token; int32, [batch, seq]."""
    ends = (tokens == end).to(torch.int32)
    return ends.cumsum(1, dtype=torch.int32) - ends


def block_mask(numbers: Tensor) -> BlockMask:
    """The mask for FlexAttention, of the number of each token's document."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (numbers[batch, query] == numbers[batch, key])

    batch, seq = numbers.shape
    return create_block_mask(sees, batch, None, seq, seq, device=numbers.device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, grouped: bool) -> Tensor:
    """What each query takes from the values that it sees; [batch, heads, seq, head_dim].

    Args:
        q: [batch, heads, seq, head_dim].
        k: the same with as many heads, or with fewer if `grouped`.
        v: as `k`.
        mask: None for all that come before.
        grouped: whether several heads of `q` share one of `k` and `v`.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return flex(q.device.type)(q, k, v, block_mask=mask, enable_gqa=grouped)


@cache
def flex(device: str) -> Callable[..., Tensor]:
    """FlexAttention; compiled for CUDA, where it would otherwise hold all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
    attention: Callable[..., Tensor] = compiled
    return attention
