"""The memory of a traced step against what the same step really allocates, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from real_step import (
    NARROW,
    SIZES,
    VOCAB,
    allocated_at_peak,
    config,
    two_any_world_steps,
    two_steps,
)
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from kempner.config.integrity import IntegritySection
from kempner.config.sections import Config, DataSection
from kempner.model.spec.communication import Choice
from kempner.model.spec.memory import estimate_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.training.corruption import StepPart
from kempner.training.plan.trace import Step, traced

WHAT_KERNELS_TAKE = {"float32": 0.001, "bfloat16": 0.05}
"""What a kernel allocates for itself is not traced: on CPUs products in bfloat16 do."""
CASES = {
    "eager": (config(), 1),
    "several micro batches": (config(), 3),
    "recomputed": (config(activation_checkpointing="full"), 2),
    "recomputed in part": (config(activation_checkpointing="selective", loss_chunk=64), 2),
    "all logits": (config(loss_chunk=0), 2),
    "Muon": (config("muon"), 1),
    "documents": (config().model_copy(update={"data": DataSection(document_mask=True)}), 2),
    "autocast": (config(dtype="bfloat16"), 2),
}


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, for which a step is not traced: its process group is a real one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_a_trace_holds_what_the_step_does(case: str, alone: None) -> None:
    asked, micro_steps = CASES[case]
    torch.set_num_threads(1)
    held = allocated_at_peak(partial(two_steps, asked, None, Choice(), micro_steps))
    dist.destroy_process_group()
    memory = traced_memory(asked, micro_steps)
    assert memory == pytest.approx(held, rel=WHAT_KERNELS_TAKE[asked.train.dtype])


@pytest.mark.parametrize(
    ("model", "length", "most"), [(SIZES, 8, StepPart.UPDATE), (NARROW, 1024, StepPart.GRADIENT)]
)
def test_a_check_of_a_step_holds_what_is_estimated(
    model: object, length: int, most: StepPart, alone: None
) -> None:
    """With few activations and with many, where ranks differ and another one has to compute."""
    torch.set_num_threads(1)
    train = {"same_on_any_world": True, "threads": 1, "dtype": "bfloat16", "global_batch_size": 4}
    asked = config(model=model, seq_len=length, **train)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    held = {
        doubted: allocated_at_peak(partial(two_any_world_steps, asked, mesh, doubted))
        for doubted in (None, StepPart.GRADIENT, StepPart.UPDATE)
    }
    checked = asked.model_copy(update={"integrity": IntegritySection(recompute_interval=1)})
    shape, choice = Shape.of(asked.model, VOCAB), Choice(reduce_once=True)
    estimate = estimate_memory(checked, shape, MeshDegrees(), 2, choice)
    assert max(held.values()) == held[most]
    beside_a_step = held[None] + estimate.recomputation
    expected = beside_a_step if most is StepPart.GRADIENT else estimate.total
    assert held[most] == pytest.approx(expected, rel=0.02)


def traced_memory(asked: Config, micro_steps: int) -> int:
    step = Step(asked, VOCAB, MeshDegrees(), Choice(), micro_steps, as_on_gpu=False)
    return traced(step).memory.total
