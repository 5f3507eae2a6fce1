"""LoRA beside frozen weights: the arithmetic of PEFT, first values of the seed, what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore

from kempner.config.sections import Config
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import build_model
from kempner.model.spec.adapter import Adapter, peft_config, peft_name
from kempner.model.spec.huggingface import model_config, weight_name
from kempner.model.spec.memory import checkpoint_bytes, estimate_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, update

CPU = torch.device("cpu")
VOCAB, ROWS, LENGTH, STEPS = 61, 4, 12, 10
TABLE = {
    "model": {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40},
    "train": {"seq_len": LENGTH, "seed": 3, "global_batch_size": ROWS, "micro_batch_size": 2},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.01},
}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def config(**adapter: object) -> Config:
    return Config.model_validate({**TABLE, "adapter": adapter})


def adapted(asked: Config, vocab_size: int = VOCAB) -> Transformer:
    """Beside the weights that a run without an adapter begins with."""
    model = build_model(asked, vocab_size, CPU, None)
    whole = build_model(Config.model_validate(TABLE), vocab_size, CPU, None)
    model.load_state_dict(whole.state_dict(), strict=False)
    return model


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)


def theirs(asked: Config, model: Transformer, folder: Path) -> torch.nn.Module:
    """The same in PEFT, by the names under which an export has it."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, adapter = model.shape, Adapter.of(asked.adapter)
    assert adapter is not None
    table = model_config(shape.fixed(), "float32")
    assert table is not None
    base = LlamaForCausalLM(LlamaConfig(**table, attn_implementation="sdpa"))
    kept = peft_config(adapter, None)
    wrapped = get_peft_model(base, LoraConfig(**{**kept, "inference_mode": False}))
    own = dict(model.named_parameters())
    names = {
        peft_name(name) or f"base_model.model.{weight_name(name)}": tensor
        for name, tensor in own.items()
    }
    for name, parameter in wrapped.named_parameters():
        plain = name.replace(".base_layer", "").replace(".default", "")
        parameter.data.copy_(names.pop(plain))
    assert not names
    return wrapped


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "adapter",
    [{"rank": 3}, {"rank": 4, "alpha": 2.0, "rslora": True, "targets": ["q_proj", "down_proj"]}],
)
def test_ten_steps_are_those_of_peft(adapter: dict[str, object], tmp_path: Path) -> None:
    asked = config(**adapter)
    model = adapted(asked)
    before = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    other = theirs(asked, model, tmp_path)
    optimizer = build_optimizer(model, asked.optimizer)
    trained = [p for p in other.parameters() if p.requires_grad]
    others = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    gradient = StepGradient(model, CPU, seed=3, rank=0)
    for step, rows in enumerate(batches(), 1):
        tokens, targets = rows[:, :-1], rows[:, 1:].contiguous()
        with torch.no_grad():
            logits, expected = model(tokens), other(input_ids=tokens).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        micro = [MicroBatch(tokens[n : n + 2], targets[n : n + 2]) for n in (0, 2)]
        loss = gradient.add(micro, step)
        of_other = other(input_ids=tokens, labels=rows[:, :-1], shift_labels=targets).loss
        of_other.backward()
        assert loss.item() == pytest.approx(of_other.item(), rel=1e-5)
        update(model, optimizer, loss, 1e-2, 1.0)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        others.step()
        others.zero_grad()
    assert all(
        torch.equal(tensor, before[n]) for n, tensor in model.named_parameters() if n in before
    )
    assert all(parameter.grad is None for n, parameter in model.named_parameters() if n in before)
    assert {p for p in model.parameters() if p.requires_grad} == {*optimizer.state}
    assert {*model.state_dict()} == {n for n, p in model.named_parameters() if p.requires_grad}


def test_first_values_are_those_of_the_seed() -> None:
    first, again = (dict(adapted(config(rank=8)).named_parameters()) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if name.endswith("lora_B"):
            assert not tensor.any()
        if name.endswith("lora_A"):
            bound = 1 / math.sqrt(tensor.shape[1])
            assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2)
            assert tensor.abs().max() <= bound


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"adapter": {"alpha": 8.0}}, "alpha has no effect without rank"),
        ({"adapter": {"rank": 2}, "model": {"factory": "a:b"}}, "no layers of known names"),
        ({"adapter": {"rank": 2}, "optimizer": {"name": "muon"}}, "whole weight matrices"),
        ({"adapter": {"rank": 2}, "train": {"fp8": True, "compile": True}}, "train.fp8"),
        (
            {
                "adapter": {"rank": 2, "dropout": 0.1},
                "parallelism": {"tensor_parallel_degree": 2},
            },
            "other elements of one input",
        ),
    ],
)
def test_what_cannot_be_is_refused(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Config.model_validate(table)


def test_a_checkpoint_is_a_small_share_of_the_model() -> None:
    whole = Config.model_validate({"model": {"preset": "llama3.1-8b"}})
    small = Config.model_validate({"model": {"preset": "llama3.1-8b"}, "adapter": {"rank": 16}})
    beside, alone = (checkpoint_bytes(asked, 128_256) for asked in (small, whole))
    assert beside == 12 * 41_943_040  # the parameters that PEFT counts for it, with two moments
    assert alone is not None
    assert beside < alone / 150
    sizes = [
        estimate_memory(asked, Shape.of(asked.model, 128_256), MeshDegrees(), 2)
        for asked in (small, whole)
    ]
    assert sizes[0].gradients + sizes[0].moments == beside
    assert sizes[0].total < sizes[1].total / 2
