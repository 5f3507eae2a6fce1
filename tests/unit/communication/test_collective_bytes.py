"""The formulas of communication against the collectives of the real step, to the byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kempner.config.loading import load
from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import build_model, shard
from kempner.model.spec.communication import Buffers, Choice, step_buffers, tensor_buffers
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.plan.trace import fake_ranks, sent_by

CONFIG_7B = Path(__file__).parents[3] / "configs/train/7b.toml"
CPU = torch.device("cpu")
VOCAB, LENGTH = 257, 8
CHOICES = [Choice(once, keep) for once, keep in product((False, True), repeat=2)]
SIZES = {
    "dim": 48,
    "n_layers": 3,
    "n_heads": 6,
    "n_kv_heads": 2,
    "ffn_dim": 100,
    "vocab_multiple": 2,
}
MODELS = {
    "untied": SIZES,
    "tied": {**SIZES, "tie_embeddings": True},
    "qwen": {**SIZES, "qk_norm": True, "head_dim": 16, "vocab_multiple": 64},
    "one block": {**SIZES, "n_layers": 1},
}
CASES = [
    *(
        ("untied", "float32", mesh)
        for mesh in (MeshDegrees(1, 2), MeshDegrees(1, 3), MeshDegrees(2, 2), MeshDegrees(4, 1))
    ),
    ("untied", "bfloat16", MeshDegrees(8, 4)),
    ("tied", "bfloat16", MeshDegrees(1, 3)),
    ("tied", "float32", MeshDegrees(2, 2)),
    ("qwen", "bfloat16", MeshDegrees(1, 32)),
    ("qwen", "bfloat16", MeshDegrees(3, 5)),
    ("one block", "bfloat16", MeshDegrees(1, 3)),
    ("untied", "bfloat16", MeshDegrees(1, 1, 2)),
    ("tied", "bfloat16", MeshDegrees(1, 3, 2)),
    ("qwen", "float32", MeshDegrees(2, 2, 2)),
]


class Collectives(TorchDispatchMode):
    """Sums the bytes that collectives are given, by kind and by the API that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (sent := sent_by(func, args)) is not None:
            operation, size, _ = sent
            # Those of FSDP and of the loss are `c10d` ones, those of layers functional.
            self.bytes[f"{func.namespace} {operation}"] += size
        return func(*args, **(kwargs or {}))


def test_7b_on_eight_nodes_sends_what_is_counted() -> None:
    """All 32 blocks, on fake tensors."""
    shape = Shape.of(load(CONFIG_7B).model, 32000)
    for mesh in (MeshDegrees(1, 32), MeshDegrees(8, 4)):
        choice = Choice(reduce_once=True, keep_parameters=mesh.replicate == 1)
        with fake_ranks(mesh) as device_mesh, FakeTensorMode():
            tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
            model = Transformer(shape)
            shard(model, device_mesh, torch.bfloat16, choice)
            found, _ = sent(model, [MicroBatch(tokens, tokens)] * 2, choice)
        assert found == step_buffers(shape, mesh, choice, micro_batches=2, compute_bytes=2)


def counted(
    config: Config, mesh: MeshDegrees, choice: Choice, micro_batches: int
) -> tuple[Buffers, int]:
    """What the collectives of a second step are given; see `sent`."""
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens)] * micro_batches
    with fake_ranks(mesh) as device_mesh:
        model = build_model(config, VOCAB, CPU, device_mesh, choice)
        sent(model, batches, choice, mesh.tensor)
        model.zero_grad()
        return sent(model, batches, choice, mesh.tensor)


def sent(
    model: nn.Module, batches: list[MicroBatch], choice: Choice, tensor: int = 1
) -> tuple[Buffers, int]:
    """What the collectives of a step are given, with all all-reduces in one; and what of a sequence
    is gathered and scattered over a tensor group.
    """
    with Collectives() as collectives:
        gradient = StepGradient(model, CPU, seed=1, rank=0, copies=tensor, choice=choice)
        gradient.add(batches, step=1)
    found = collectives.bytes
    layers = "_c10d_functional"
    buffers = Buffers(
        all_gather=found.pop("c10d all_gather", 0),
        reduce_scatter=found.pop("c10d reduce_scatter", 0),
        all_reduce=found.pop("c10d all_reduce", 0) + found.pop(f"{layers} all_reduce", 0),
    )
    sequence = found.pop(f"{layers} all_gather", 0) + found.pop(f"{layers} reduce_scatter", 0)
    assert not found
    return buffers, sequence


@pytest.mark.parametrize(("model", "dtype", "mesh"), CASES)
def test_a_step_sends_what_is_counted(model: str, dtype: str, mesh: MeshDegrees) -> None:
    config = Config(
        model=ModelSection.model_validate(MODELS[model]),
        train=TrainSection.model_validate(
            {
                "seq_len": LENGTH,
                "dtype": dtype,
                "loss_chunk": 4,  # all-reduces of three numbers count as those of a step
                "activation_checkpointing": "full" if model == "qwen" else "none",
            }
        ),
    )
    shape, compute_bytes = Shape.of(config.model, VOCAB), 4 if dtype == "float32" else 2
    for choice, micro_batches in [*product(CHOICES, (3,)), (CHOICES[0], 1)]:
        found, sequence = counted(config, mesh, choice, micro_batches)
        expected = step_buffers(
            shape, mesh, choice, micro_batches=micro_batches, compute_bytes=compute_bytes
        )
        if mesh.tensor > 1:
            of_group = tensor_buffers(
                shape,
                choice,
                micro_batches=micro_batches,
                tokens=LENGTH,
                compute_bytes=compute_bytes,
                recomputed_blocks=shape.n_layers if model == "qwen" else 0,
            )
            assert sequence == of_group.sequence
            expected = replace(expected, all_reduce=expected.all_reduce + of_group.all_reduce)
        else:
            assert sequence == 0
        assert found == expected
        assert sum(astuple(found)) > 0
