"""Operators whose backward is written by hand, and the loss.

Norm, rotary positions and feed-forward keep less for it than autograd would, and make fewer passes
over memory. The formulas are those of the plain operators; gradients differ from theirs in rounding
only. `usable` says where they stand in: not where a compiler does the same itself, nor for what
torch's operators must see (DTensors, autocast, float8), nor for weights that do not train, whose
gradients nothing needs.

The cross entropy of a linear layer's outputs never holds all of them. The logits of a micro batch
are the largest tensor of a step: tokens x vocabulary in float32, of which the loss and its backward
make four. Here they exist for a chunk of the tokens at a time, and the gradients are computed
beside the loss, while the chunk's logits are there, as Liger does ("Liger Kernel",
arXiv:2410.10989). `torch.nn.functional.linear_cross_entropy` does the same from torch 2.13, but
rounds the sum of a bfloat16 loss to bfloat16, wants one type for inputs and weights, and imports
torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE = -100
"""Target of a token that weighs nothing: the default of `torch.nn.functional.cross_entropy`."""


def cross_entropy(logits: Tensor, targets: Tensor, each: bool = False) -> Tensor:
    """Cross entropy in nats, summed over all tokens with a target; a float32 scalar.

    Args:
        logits: [batch, seq, vocab_size].
        targets: int64, [batch, seq], below `vocab_size` or `IGNORE`.
        each: give that of each token, [batch * seq], 0 without a target.
    """
    reduction = "none" if each else "sum"
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction=reduction
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    chunk: int,
    each: bool = False,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T` in nats, summed over all tokens; a float32 scalar.

    As `cross_entropy` of the logits, to rounding. It can be differentiated once.

    Args:
        hidden: [tokens, dim].
        weight: [rows, dim]; rows from `vocab_size` on are no tokens, and get no gradient. Matrices
            multiply in autocast's type where that is on, else in this one's.
        targets: int64, [tokens], below `vocab_size` or `IGNORE`.
        chunk: most tokens whose logits exist at once, at least 1.
        each: give that of each token, [tokens], 0 without a target; only if `weight` does not
            train.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    how = _LossOptions(vocab_size, chunk, dtype, each)
    with torch.autocast(kind, enabled=False):
        if not torch.is_grad_enabled():
            return _chunks(hidden, weight, targets, how, gradients=False)[0]
        loss: Tensor = WithGradients.apply(hidden, weight, targets, partial(_chunks, how=how))  # type: ignore[no-untyped-call]
        return loss


class _LossOptions(NamedTuple):
    """What is no tensor: number of token ids, tokens in a chunk, type to multiply in, and whether
    the loss is that of each token."""

    vocab_size: int
    chunk: int
    dtype: torch.dtype
    each: bool


Chunks: TypeAlias = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Takes hidden, weight, targets and whether `gradients` are wanted; gives the loss, summed or of
each token, and the gradients of hidden and of a weight that trains."""


class WithGradients(torch.autograd.Function):
    """The loss of `chunks`, whose gradients are computed beside it; to be differentiated once. They
    are those for a loss whose own gradient is 1, to be scaled in the backward: where each token has
    a loss, by its own, which a weight has no part for."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: Chunks
    ) -> Tensor:
        loss, of_hidden, of_weight = chunks(hidden, weight, targets, gradients=True)
        if loss.ndim and weight.requires_grad:
            raise ValueError("the loss of each token is for a weight that does not train")
        ctx.save_for_backward(of_hidden, of_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        trains = ctx.needs_input_grad[1]
        of_tokens = of_loss[:, None] if of_loss.ndim else of_loss
        return of_hidden.mul_(of_tokens), of_weight.mul_(of_loss) if trains else None, None, None


def _chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, how: _LossOptions, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and what it makes of `hidden` and `weight`, if `gradients` are wanted."""
    rows = weight[: how.vocab_size].to(how.dtype)
    loss = hidden.new_zeros(len(hidden) if how.each else (), dtype=torch.float32)
    of_hidden = torch.empty_like(hidden if gradients else hidden[:0])
    # Sums of chunks in float32: rounded to bfloat16 after every chunk, small ones would be lost.
    trains = gradients and weight.requires_grad
    of_weight = torch.zeros_like(weight if trains else weight[:0], dtype=torch.float32)
    for start in range(0, hidden.shape[0], how.chunk):
        part = slice(start, start + how.chunk)
        counted = (targets[part] != IGNORE)[:, None]
        ids = targets[part, None].where(counted, 0)
        x = hidden[part].to(how.dtype)
        logits = (x @ rows.T).float()
        logp = logits.log_softmax(-1)
        del logits
        likely = logp.gather(1, ids)
        if how.each:
            loss[part] -= likely.where(counted, 0)[:, 0]
        else:
            loss -= likely.where(counted, 0).sum()
        if not gradients:
            continue
        # Softmax, less 1 at the target.
        of_logits = logp.exp_().scatter_(1, ids, likely.exp() - 1).to(how.dtype)
        of_hidden[part] = (of_logits @ rows).where(counted, 0)
        if not trains:
            continue
        x = x.where(counted, 0)
        if how.dtype is torch.float32:
            of_weight[: how.vocab_size].addmm_(of_logits.T, x)
        else:
            of_weight[: how.vocab_size] += of_logits.T @ x
    return loss, of_hidden, of_weight.to(weight.dtype)


def usable(x: Tensor, *modules: nn.Module) -> bool:
    """Whether these may compute `x` for plain modules of torch with plain weights."""
    device = x.device.type
    return (
        device in ("cpu", "cuda")
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(device)
        and not hasattr(x, "device_mesh")  # a DTensor, which takes a second to import
        and all(type(module) in (nn.Linear, nn.RMSNorm) for module in modules)
        and not any(hasattr(module.weight, "device_mesh") for module in modules)
        and all(module.weight.dtype == x.dtype for module in modules)
        and all(module.weight.requires_grad for module in modules)
    )


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """`norm(x)`: x / sqrt(mean(x^2) + eps) * weight over the last dimension. Keeps x and one number
    for each row."""
    if x.dtype is not torch.float32 or x.device.type != "cpu" or not usable(x, norm):
        plain: Tensor = norm(x)  # on a GPU one kernel, and bfloat16 is summed in float32
        return plain
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    fused: Tensor = _RMSNorm.apply(x, norm.weight, eps)  # type: ignore[no-untyped-call]
    return shown(norm, x, fused)


def shown(module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    """`output`, which hooks of a module get to see although it has not computed it itself."""
    for hook in module._forward_hooks.values():
        hook(module, (x,), output)
    return output


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps) of a row of n elements, and p = grad * x:

    grad of x = r (grad * weight) - x r^3 (p . weight) / n; grad of weight = sum over rows of r p.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normed: Tensor = (x * inverse).mul_(weight)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        products, rows = (grad * x).flatten(0, -2), inverse.flatten()
        of_weight = torch.mv(products.t(), rows)
        share = rows.pow(3).mul_(torch.mv(products, weight)).div_(x.shape[-1]).view_as(inverse)
        of_x = (grad * weight).mul_(inverse).addcmul_(x, share, value=-1)
        return of_x, of_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys, [batch, heads, seq, head_dim], by their positions, in float32. `cos`
    and `sin` are float32, [seq, head_dim], of which both halves are the same."""
    exact = x.float()
    if usable(x):
        turned: Tensor = _Rotation.apply(exact, cos, sin)  # type: ignore[no-untyped-call]
        return turned.type_as(x)
    low, high = exact.chunk(2, dim=-1)
    return (exact * cos + torch.cat((-high, low), dim=-1) * sin).type_as(x)


class _Rotation(torch.autograd.Function):
    """Turns pairs of elements, i and i + head_dim / 2, by their angles; keeps nothing of them. The
    gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    turned = x * cos
    half = x.shape[-1] // 2
    (low, high), (new_low, new_high) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    new_low.addcmul_(high, sin[..., :half], value=-sign)
    new_high.addcmul_(low, sin[..., half:], value=sign)
    return turned


class FusedFeedForward(torch.autograd.Function):
    """SwiGLU (Shazeer, arXiv:2002.05202), (silu(x gate') * (x up')) down', which keeps x and the
    two products of it.

    What is multiplied with `down`, [dim, ffn_dim], is computed again in the backward. Gradients are
    the bits of the plain operators. Not for a block that is computed again as a whole: that would
    be multiplied with `down`, too, which nothing needs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gated, upped = F.linear(x, gate), F.linear(x, up)
        ctx.save_for_backward(x, gate, up, down, gated, upped)
        return F.linear(F.silu(gated).mul_(upped), down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide, gate, up, down, gated, upped = ctx.saved_tensors
        x, gated, upped = (kept.flatten(0, -2) for kept in (wide, gated, upped))
        rows = grad.flatten(0, -2)
        silu = F.silu(gated)
        of_down = rows.t() @ (silu * upped)
        of_hidden = rows @ down
        of_up = silu.mul_(of_hidden)
        of_gate = torch.ops.aten.silu_backward(of_hidden.mul_(upped), gated)
        of_x = (of_up @ up).add_(of_gate @ gate)  # as autograd does, to the same bits
        return of_x.view(wide.shape), of_gate.t() @ x, of_up.t() @ x, of_down


class Projections(torch.autograd.Function):
    """x, [..., dim], times each of several weights, [out, dim]; their gradients of x are added up
    as they come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        rows = [grad.flatten(0, -2) for grad in grads]
        of_x = rows[0] @ weights[0]
        for grad, weight in zip(rows[1:], weights[1:], strict=True):
            of_x = torch.addmm(of_x, grad, weight)
        flat = x.flatten(0, -2)
        return of_x.view(x.shape), *(grad.t() @ flat for grad in rows)
