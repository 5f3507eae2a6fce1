"""What `fused` computes, against the plain operators and against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kempner.model import fused
from kempner.model.transformer import rotary_table

COS, SIN = rotary_table(6, 4, 10_000.0).double()


def drawn(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, dtype=torch.float64, generator=generator).requires_grad_()


def norm(weight: Tensor) -> nn.RMSNorm:
    module = nn.RMSNorm(6, eps=1e-3)
    module.weight = nn.Parameter(weight)
    return module


def plain_rotation(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * COS + torch.cat((-high, low), dim=-1) * SIN


def plain_feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def plain_projections(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (6,), weight, 1e-3)


CASES = {
    "norm": (
        lambda x, weight: fused._RMSNorm.apply(x, weight, 1e-3),
        plain_norm,
        [drawn(2, 4, 6), drawn(6)],
    ),
    "rotation": (lambda x: fused._Rotation.apply(x, COS, SIN), plain_rotation, [drawn(2, 3, 4, 6)]),
    "rotation of heads that lie apart": (
        lambda x: fused._Rotation.apply(x.transpose(1, 2), COS, SIN),
        lambda x: plain_rotation(x.transpose(1, 2)),
        [drawn(2, 4, 3, 6)],
    ),
    "feed-forward": (
        fused.FusedFeedForward.apply,
        plain_feed_forward,
        [drawn(2, 4, 6), drawn(5, 6), drawn(5, 6), drawn(6, 5)],
    ),
    "projections": (
        fused.Projections.apply,
        plain_projections,
        [drawn(2, 4, 6), drawn(6, 6), drawn(3, 6), drawn(3, 6)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_plain_ones_and_gradients_those_of_differences(name: str) -> None:
    ours, plain, inputs = CASES[name]
    torch.testing.assert_close(ours(*inputs), plain(*inputs), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["feed-forward", "projections"])
def test_gradients_differ_in_rounding_only(name: str, dtype: torch.dtype) -> None:
    ours, plain, inputs = CASES[name]
    found, expected = (gradients(by, inputs, dtype) for by in (ours, plain))
    scale = torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is dtype
        torch.testing.assert_close(one, other, rtol=8 * scale, atol=32 * scale)


def gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    given = [x.detach().to(dtype).requires_grad_() for x in inputs]
    made = function(*given)
    outputs = made if isinstance(made, tuple) else (made,)
    return torch.autograd.grad([y.sin().sum() for y in outputs], given)


def test_where_torch_must_see_the_operators_they_are_not_usable() -> None:
    x, linear = torch.ones(2, 4, requires_grad=True), nn.Linear(4, 4, bias=False)
    assert fused.usable(x, linear)
    assert not fused.usable(x.to(torch.bfloat16), linear)
    assert not fused.usable(x, nn.LayerNorm(4))
    with torch.no_grad():
        assert not fused.usable(x, linear)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused.usable(x, linear)
    seen: list[bool] = []

    def compiled(x: Tensor) -> Tensor:
        seen.append(fused.usable(x, linear))
        return x * 2

    torch.compile(compiled, backend="eager")(x)
    assert seen == [] or seen == [False]
