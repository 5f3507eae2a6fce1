"""The formulas of communication against the collectives of the real step, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from kempner.config.loading import load
from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import build_model, shard
from kempner.model.spec.communication import Buffers, Choice, step_buffers
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer
from kempner.training.compute.forward_backward import accumulate

CONFIG_7B = Path(__file__).parents[3] / "configs/train/7b.toml"
CPU = torch.device("cpu")
VOCAB, LENGTH = 257, 8
CHOICES = [Choice(once, keep) for once, keep in product((False, True), repeat=2)]
SIZES = {"dim": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "ffn_dim": 100}
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
]


class Collectives(TorchDispatchMode):
    """Sums the bytes that collectives are given, by kind; those of scalars are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            # All-gathers list the output first, and reduce-scatters the input second.
            buffer = args[1] if name.startswith("_reduce_scatter") else args[0]
            tensors = [buffer] if isinstance(buffer, Tensor) else buffer
            if sum(tensor.numel() for tensor in tensors) > 1:
                self.bytes[name] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_ranks(mesh: MeshDegrees) -> Iterator[Any]:
    """A mesh of which only this rank is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.world)
    shape = (mesh.replicate, mesh.shard) if mesh.replicate > 1 else (mesh.shard,)
    names = ("replicate", "shard")[-len(shape) :]
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def test_7b_on_eight_nodes_sends_what_is_counted() -> None:
    """All 32 blocks, on fake tensors."""
    shape = Shape.of(load(CONFIG_7B).model, 32000)
    for mesh in (MeshDegrees(1, 32), MeshDegrees(8, 4)):
        choice = Choice(reduce_once=True, keep_parameters=mesh.replicate == 1)
        with fake_ranks(mesh) as device_mesh, FakeTensorMode():
            tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
            model = Transformer(shape)
            shard(model, device_mesh, torch.bfloat16, choice)
            found = sent(model, [MicroBatch(tokens, tokens)] * 2, choice)
        assert found == step_buffers(shape, mesh, choice, micro_batches=2, compute_bytes=2)


def counted(config: Config, mesh: MeshDegrees, choice: Choice, micro_batches: int) -> Buffers:
    """What the collectives of a second step are given."""
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens)] * micro_batches
    with fake_ranks(mesh) as device_mesh:
        model = build_model(config, VOCAB, CPU, device_mesh, choice)
        sent(model, batches, choice)
        model.zero_grad()
        return sent(model, batches, choice)


def sent(model: nn.Module, batches: list[MicroBatch], choice: Choice) -> Buffers:
    """What the collectives of a step are given."""
    with Collectives() as collectives:
        accumulate(model, batches, device=CPU, seed=1, step=1, rank=0, choice=choice)
    found = collectives.bytes
    buffers = Buffers(
        all_gather=found.pop("_allgather_base_", 0),
        reduce_scatter=found.pop("_reduce_scatter_base_", 0),
        all_reduce=found.pop("allreduce_", 0),
    )
    assert not found
    return buffers


@pytest.mark.parametrize(("model", "dtype", "mesh"), CASES)
def test_a_step_sends_what_is_counted(model: str, dtype: str, mesh: MeshDegrees) -> None:
    config = Config(
        model=ModelSection.model_validate(MODELS[model]),
        train=TrainSection.model_validate(
            {
                "seq_len": LENGTH,
                "dtype": dtype,
                "loss_chunk": 5,
                "activation_checkpointing": "full" if model == "qwen" else "none",
            }
        ),
    )
    for choice, micro_batches in [*product(CHOICES, (3,)), (CHOICES[0], 1)]:
        found = counted(config, mesh, choice, micro_batches)
        assert found == step_buffers(
            Shape.of(config.model, VOCAB),
            mesh,
            choice,
            micro_batches=micro_batches,
            compute_bytes=4 if dtype == "float32" else 2,
        )
        assert max(found.all_gather, found.all_reduce) > 0
