"""Norm, rotary positions and feed-forward whose backward is written by hand.

They keep less for it than autograd would, and make fewer passes over memory. The formulas are
those of the plain operators; gradients differ from theirs in rounding only. `usable` says where
they stand in: not where a compiler does the same itself, nor for what torch's operators must see
(DTensors, autocast, float8).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def usable(x: Tensor, *modules: nn.Module) -> bool:
    """Whether these may compute `x` for plain modules of torch with plain weights."""
    device = x.device.type
    return (
        device in ("cpu", "cuda")
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(device)
        and not _is_distributed(x)
        and all(type(module) in (nn.Linear, nn.RMSNorm) for module in modules)
        and not any(_is_distributed(module.weight) for module in modules)
        and all(module.weight.dtype == x.dtype for module in modules)
    )


def _is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor, which takes a second to import."""
    return hasattr(tensor, "device_mesh")


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """`norm(x)`: x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Keeps x and one number for each row.
    """
    if x.dtype is not torch.float32 or x.device.type != "cpu" or not usable(x, norm):
        plain: Tensor = norm(x)  # on a GPU one kernel, and bfloat16 is summed in float32
        return plain
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    fused: Tensor = _RMSNorm.apply(x, norm.weight, eps)  # type: ignore[no-untyped-call]
    return fused


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
    """Turn pairs of elements, i and i + head_dim / 2, by their angles; keeps nothing of `x`.

    Args:
        x: float32, [..., seq, head_dim].
        cos: float32, [seq, head_dim]; both halves are the same.
        sin: float32, [seq, head_dim]; both halves are the same.
    """
    turned: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


class _Rotation(torch.autograd.Function):
    """The gradient is turned back."""

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


def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU, (silu(x gate') * (x up')) down', which keeps x and the two products of it.

    What is multiplied with `down` is computed again in the backward. Gradients are the bits of the
    plain operators. Not for a block that is computed again as a whole: that would be multiplied
    with `down`, too, which nothing needs.

    Args:
        x: [..., dim].
        gate: [ffn_dim, dim].
        up: [ffn_dim, dim].
        down: [dim, ffn_dim].
    """
    fed: Tensor = _FeedForward.apply(x, gate, up, down)  # type: ignore[no-untyped-call]
    return fed


class _FeedForward(torch.autograd.Function):
    """SwiGLU (Shazeer, arXiv:2002.05202) with its three projections."""

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


def project(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """`x` times each of the weights, [out, dim]; their gradients of `x` are added up as they come.

    Args:
        x: [..., dim].
    """
    projected: tuple[Tensor, ...] = _Projections.apply(x, *weights)  # type: ignore[no-untyped-call]
    return projected


class _Projections(torch.autograd.Function):
    """Several matrices that share their input."""

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
