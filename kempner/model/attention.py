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


class KVCache:
    """Keys and values of the tokens that a block has read, so that they are computed once.

    Filled by any number of tokens, and then by one at a time.

    Args:
        capacity: the most tokens that it will hold.

    Attributes:
        length: tokens that it holds.
    """

    def __init__(self, capacity: int) -> None:
        self.length = 0
        self._capacity = capacity
        self._held: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, these at the end; [batch, kv_heads, tokens, head_dim] each.

        Raises `ValueError` if it holds tokens already and these are several: attention would need
        a mask.
        """
        if self.length and k.shape[2] != 1:
            raise ValueError(f"{k.shape[2]} tokens at once for a cache of {self.length}")
        if self._held is None:
            batch, heads, _, head_dim = k.shape
            self._held = k.new_empty(2, batch, heads, self._capacity, head_dim)
        end = self.length + k.shape[2]
        self._held[0, :, :, self.length : end] = k
        self._held[1, :, :, self.length : end] = v
        self.length = end
        keys, values = self._held[:, :, :, :end]
        return keys, values


def document_mask(tokens: Tensor, end: int, cached: int = 0) -> Mask:
    """A token sees itself and what comes before it in its document, as in Llama 3.

    FlexAttention, which skips what nobody sees, where it has a backward: on CUDA. Elsewhere a
    mask of all pairs.

    Args:
        tokens: int64, [batch, seq].
        end: the token that ends a document, and belongs to it.
        cached: if not 0, all tokens but the last, which alone gets a mask: [batch, 1, 1, seq].
    """
    numbers = _document_numbers(tokens, end)
    if cached:
        return (numbers[:, -1:] == numbers)[:, None, None]
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
        k: the same with as many heads, or with fewer if `grouped`; with more tokens, if those of
            `q` are the last one alone.
        v: as `k`.
        mask: None for all that come before.
        grouped: whether several heads of `q` share one of `k` and `v`.
    """
    if mask is None:
        causal = q.shape[2] == k.shape[2]  # else the one query is the last token, and sees all
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
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
