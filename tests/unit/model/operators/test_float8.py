"""Products in float8 are emulated here: what is rounded is as on a GPU, what multiplies is not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model import sharding
from kempner.model.sharding import build_model, use_float8
from kempner.model.transformer import Transformer
from kempner.run.process.exit_codes import UsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TOKENS = torch.arange(64).view(2, 32) % 61


def build(fp8: bool, **model: int) -> Transformer:
    sizes = ModelSection.model_validate({"dim": 64, "n_layers": 2, "ffn_dim": 96, **model})
    train = TrainSection(seq_len=32, fp8=fp8, compile=fp8)
    return build_model(Config(model=sizes, train=train), 61, CPU, None)


def step(model: Transformer) -> dict[str, Tensor]:
    torch.autograd.backward(model(TOKENS, TOKENS))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it lacks its CUDA libraries
    monkeypatch.setattr(sharding, "use_float8", lambda *args: use_float8(*args, emulate=True))


@pytest.mark.usefixtures("emulated")
def test_blocks_round_and_all_else_is_as_ever() -> None:
    plain, rough = build(fp8=False), build(fp8=True)
    assert list(rough.state_dict()) == list(plain.state_dict())
    assert all(map(torch.equal, rough.parameters(), plain.parameters()))
    linear = {
        type(module).__name__ for module in rough.modules() if isinstance(module, torch.nn.Linear)
    }
    assert linear == {"Float8Linear", "Linear"}
    assert type(rough.output) is torch.nn.Linear
    expected, found = step(plain), step(rough)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        off = (found[name] - gradient).norm() / gradient.norm()
        assert off < 0.15, name  # float8 has three bits after the point
        assert name.startswith(("embed", "norm", "output")) or off > 0.001, name


def test_a_device_that_cannot_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train\.fp8 needs a GPU; remove it"):
        build(fp8=True)


@pytest.mark.parametrize(
    ("capability", "sizes", "said"),
    [
        ((8, 0), {}, "of compute capability 8.9 or later; A100 has 8.0"),
        ((9, 0), {"ffn_dim": 100}, "needs multiples of 16, and model.ffn_dim is 100"),
    ],
)
def test_a_gpu_or_sizes_that_cannot_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], sizes: dict[str, int], said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(UsageError, match=said):
        use_float8(build(fp8=False, **sizes), GPU, 64)
