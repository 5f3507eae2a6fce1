"""The memory of a traced step against what the same step really allocates, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from real_step import VOCAB, allocated_at_peak, config
from torch.distributed import HashStore  # type: ignore[attr-defined]

from kempner.config.sections import Config, DataSection
from kempner.model.spec.communication import Choice
from kempner.model.spec.mesh import MeshDegrees
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
    held = allocated_at_peak(asked, micro_steps)
    dist.destroy_process_group()
    memory = traced_memory(asked, micro_steps)
    assert memory == pytest.approx(held, rel=WHAT_KERNELS_TAKE[asked.train.dtype])


def traced_memory(asked: Config, micro_steps: int) -> int:
    step = Step(asked, VOCAB, MeshDegrees(), Choice(), micro_steps, as_on_gpu=False)
    return traced(step).memory.total
