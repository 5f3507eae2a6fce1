"""Cross entropy of a linear layer's outputs, without ever holding all of them.

The logits of a micro batch are the largest tensor of a step: tokens x vocabulary in float32, of
which the loss and its backward make four. Here they exist for a chunk of the tokens at a time, and
the gradients are computed beside the loss, while the chunk's logits are there, as Liger does
("Liger Kernel", arXiv:2410.10989).

`torch.nn.functional.linear_cross_entropy` does the same from torch 2.13, but rounds the sum of a
bfloat16 loss to bfloat16, wants one type for inputs and weights, and imports torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""Target of a token that weighs nothing: the default of `torch.nn.functional.cross_entropy`."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed over all tokens with a target; a float32 scalar.

    Args:
        logits: [batch, seq, vocab_size].
        targets: int64, [batch, seq], below `vocab_size` or `IGNORE`.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, chunk: int
) -> Tensor:
    """Cross entropy of `hidden @ weight.T` in nats, summed over all tokens with a target.

    As `cross_entropy` of the logits, to rounding. It can be differentiated once.

    Args:
        hidden: [tokens, dim].
        weight: [rows, dim]; rows from `vocab_size` on are no tokens, and get no gradient. Matrices
            multiply in autocast's type where that is on, else in this one's.
        targets: int64, [tokens], below `vocab_size` or `IGNORE`.
        vocab_size: number of token ids.
        chunk: most tokens whose logits exist at once, at least 1.

    Returns:
        float32, a scalar.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    how = _LossOptions(vocab_size, chunk, dtype)
    with torch.autocast(kind, enabled=False):
        if not torch.is_grad_enabled():
            return _chunks(hidden, weight, targets, how, gradients=False)[0]
        return with_gradients(partial(_chunks, how=how), hidden, weight, targets)


class _LossOptions(NamedTuple):
    """What is no tensor: number of token ids, tokens in a chunk, type to multiply in."""

    vocab_size: int
    chunk: int
    dtype: torch.dtype


Chunks: TypeAlias = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Takes hidden, weight, targets and whether `gradients` are wanted; gives the summed loss, and the
gradients of hidden and weight."""


def with_gradients(chunks: Chunks, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss of `chunks`, whose gradients are computed beside it; to be differentiated once."""
    loss: Tensor = _WithGradients.apply(hidden, weight, targets, chunks)  # type: ignore[no-untyped-call]
    return loss


class _WithGradients(torch.autograd.Function):
    """The gradients for a loss whose own gradient is 1, to be scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: Chunks
    ) -> Tensor:
        loss, of_hidden, of_weight = chunks(hidden, weight, targets, gradients=True)
        ctx.save_for_backward(of_hidden, of_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden.mul_(of_loss), of_weight.mul_(of_loss), None, None


def _chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, how: _LossOptions, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss, and what it makes of `hidden` and `weight`, if `gradients` are wanted."""
    rows = weight[: how.vocab_size].to(how.dtype)
    loss = hidden.new_zeros((), dtype=torch.float32)
    of_hidden = torch.empty_like(hidden if gradients else hidden[:0])
    # Sums of chunks in float32: rounded to bfloat16 after every chunk, small ones would be lost.
    of_weight = torch.zeros_like(weight if gradients else weight[:0], dtype=torch.float32)
    for start in range(0, hidden.shape[0], how.chunk):
        part = slice(start, start + how.chunk)
        counted = (targets[part] != IGNORE)[:, None]
        ids = targets[part, None].where(counted, 0)
        x = hidden[part].to(how.dtype)
        logits = (x @ rows.T).float()
        logp = logits.log_softmax(-1)
        del logits
        likely = logp.gather(1, ids)
        loss -= likely.where(counted, 0).sum()
        if not gradients:
            continue
        # Softmax, less 1 at the target.
        of_logits = logp.exp_().scatter_(1, ids, likely.exp() - 1).to(how.dtype)
        of_hidden[part] = (of_logits @ rows).where(counted, 0)
        x = x.where(counted, 0)
        if how.dtype is torch.float32:
            of_weight[: how.vocab_size].addmm_(of_logits.T, x)
        else:
            of_weight[: how.vocab_size] += of_logits.T @ x
    return loss, of_hidden, of_weight.to(weight.dtype)
