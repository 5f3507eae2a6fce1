"""The transformer computes what a Llama does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model import fused
from kempner.model.sharding import build_model
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer, rotary_table

CPU = torch.device("cpu")
Q_NORM, K_NORM = "attention.q_norm.weight", "attention.k_norm.weight"
GROUPED = ModelSection(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=40)


def build(section: ModelSection = GROUPED, **train: object) -> Transformer:
    config = Config(model=section, train=TrainSection.model_validate({"seq_len": 16, **train}))
    return build_model(config, 29, CPU, None)


def tokens(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, 29, (batch, length), generator=torch.Generator().manual_seed(5))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_the_book(model: Transformer, row: Tensor) -> Tensor:
    """Logits [seq, vocab] of one sequence [seq], position by position, in float64."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    x = weights["embed.weight"][row]
    for number in range(model.shape.n_layers):
        block = {
            name.removeprefix(f"layers.{number}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{number}.")
        }
        x = x + attend(model.shape, block, rms_norm(x, block["attention_norm.weight"]))
        h = rms_norm(x, block["ffn_norm.weight"])
        gate = h @ block["ffn.w1.weight"].T
        up = h @ block["ffn.w3.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ block["ffn.w2.weight"].T
    x = rms_norm(x, weights["norm.weight"])
    return F.linear(x, weights["output.weight"][: model.shape.vocab_size])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * scale * weight


def attend(shape: Shape, block: dict[str, Tensor], h: Tensor) -> Tensor:
    """Attention with explicit loops, and rotary positions as complex numbers."""
    group = shape.n_heads // shape.n_kv_heads
    rows = []
    for t in range(len(h)):
        heads = []
        for head in range(shape.n_heads):
            q = turned(shape, block["attention.wq.weight"], block.get(Q_NORM), h[t], head, t)
            scores = []
            values = []
            for s in range(t + 1):
                k = turned(
                    shape, block["attention.wk.weight"], block.get(K_NORM), h[s], head // group, s
                )
                scores.append((q.conj() * k).real.sum() / math.sqrt(shape.head_dim))
                values.append(head_rows(shape, block["attention.wv.weight"], head // group) @ h[s])
            heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        rows.append(block["attention.wo.weight"] @ torch.cat(heads))
    return torch.stack(rows)


def head_rows(shape: Shape, weight: Tensor, head: int) -> Tensor:
    return weight[head * shape.head_dim : (head + 1) * shape.head_dim]


def frequency(shape: Shape, pair: int) -> float:
    """Angle per position; stretched as transformers' `_compute_llama3_parameters` says."""
    plain: float = shape.rope_theta ** (-2 * pair / shape.head_dim)
    if (scaling := shape.rope_scaling) is None:
        return plain
    wavelength, length = 2 * math.pi / plain, scaling.original_max_position_embeddings
    if wavelength > length / scaling.low_freq_factor:
        return plain / scaling.factor
    if wavelength < length / scaling.high_freq_factor:
        return plain
    smooth = (length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def turned(
    shape: Shape, weight: Tensor, norm: Tensor | None, h: Tensor, head: int, position: int
) -> Tensor:
    """A head as head_dim / 2 complex numbers (i, i + head_dim / 2), turned by its position."""
    x = head_rows(shape, weight, head) @ h
    if norm is not None:
        x = rms_norm(x, norm)
    half = shape.head_dim // 2
    angles = [position * frequency(shape, i) for i in range(half)]
    turn = torch.polar(torch.ones(half, dtype=torch.float64), torch.tensor(angles).double())
    return torch.complex(x[:half], x[half:]) * turn


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"qk_norm": True},
        {"rope_scaling": {"factor": 8, "original_max_position_embeddings": 64}},
        {"vocab_multiple": 8},
    ],
)
def test_logits_equal_the_formulas(more: dict[str, object]) -> None:
    given = GROUPED.model_dump(exclude_none=True) | {"rope_theta": 500.0, **more}
    model = build(ModelSection.model_validate(given))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # far from zero, where nothing is linear
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator(parameter.numel()))
        logits = model(tokens())
        expected = torch.stack([by_the_book(model, row) for row in tokens()])
    assert logits.dtype is torch.float32
    assert logits.shape == (2, 11, 29)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)


def test_no_position_sees_the_future() -> None:
    model, seen = build(), tokens()
    changed = seen.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 29
    before, after = model(seen), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = rotary_table(head_dim=8, max_seq_len=64, theta=10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(2)).unbind()
    q, k = (
        fused.rotate(q.expand(1, 1, 64, 8), cos, sin)[0, 0],
        fused.rotate(k.expand(1, 1, 64, 8), cos, sin)[0, 0],
    )
    torch.testing.assert_close(q.norm(dim=-1), q[0].norm().expand(64))
    scores = q @ k.T
    torch.testing.assert_close(scores[10, 3], scores[60, 53], rtol=1e-4, atol=1e-5)
    assert not torch.isclose(scores[10, 3], scores[10, 4])


def test_parameter_names_are_the_contract() -> None:
    names = [name for name, _ in build().named_parameters()]
    block = [
        "attention_norm",
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "attention.wo",
        "ffn_norm",
        "ffn.w1",
        "ffn.w2",
        "ffn.w3",
    ]
    assert names == [
        "embed.weight",
        *(f"layers.{i}.{name}.weight" for i in range(2) for name in block),
        "norm.weight",
        "output.weight",
    ]
    assert list(build().state_dict()) == names


def test_tied_embedding_is_the_output_projection() -> None:
    model = build(GROUPED.model_copy(update={"tie_embeddings": True}))
    assert "output.weight" not in model.state_dict()
    model(tokens()).sum().backward()
    unused = model.embed.weight.grad[tokens().max() + 1 :]  # type: ignore[index]
    assert unused.abs().min() > 0


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_no_token_are_neither_predicted_nor_trained(tied: bool) -> None:
    model = build(GROUPED.model_copy(update={"vocab_multiple": 16, "tie_embeddings": tied}))
    assert model.embed.weight.shape == (32, 24)
    logits = model(tokens())
    assert logits.shape == (2, 11, 29)
    F.cross_entropy(logits.flatten(0, 1), tokens().flatten()).backward()
    for table in [model.embed] if model.output is None else [model.embed, model.output]:
        assert table.weight.grad is not None
        assert table.weight.grad[29:].abs().max() == 0
        assert table.weight.grad[:29].abs().max() > 0


def test_dropout_drops_while_training_only() -> None:
    model = build(GROUPED.model_copy(update={"dropout": 0.5}))
    assert not torch.equal(model(tokens()), model(tokens()))
    torch.manual_seed(3)
    first = model(tokens())
    torch.manual_seed(3)
    assert torch.equal(first, model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), build()(tokens()))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(qk_norm: bool) -> None:
    section = GROUPED.model_copy(update={"qk_norm": qk_norm})
    exact, rough = build(section)(tokens()), build(section, dtype="bfloat16")(tokens())
    assert rough.dtype is torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, rtol=0.1, atol=0.02)
    model = build(section, dtype="bfloat16")
    model(tokens()).sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype is torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32


def test_more_positions_leave_the_first_ones_as_they_are() -> None:
    shape = Shape.of(GROUPED, 29)
    short = rotary_table(shape.head_dim, 16, shape.rope_theta)
    long = rotary_table(
        shape.head_dim, replace(shape, max_seq_len=64).max_seq_len, shape.rope_theta
    )
    assert torch.equal(short, long[:, :16])
