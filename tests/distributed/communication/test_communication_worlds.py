"""Over real processes: whatever is sent when, gradients are the same; and as much as counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from communication_ranks import (
    CASES,
    CHOICES,
    MICRO_BATCHES,
    MODELS,
    VOCAB,
    WIDE,
    WORLD,
    Outcome,
    outcome,
)
from harness import launch
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.model.spec.communication import Choice, node_traffic, step_buffers
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape

TOLERANCE = 1e-6
"""Largest difference of a gradient, relative to its largest element, and of a loss of about 5: a
few float32 roundings."""
PROGRAM = Path(__file__).with_name("communication_ranks.py")

Outcomes = dict[tuple[str, str, str], Outcome]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By model, mesh and choice."""
    out = tmp_path_factory.mktemp("communication") / "rank0.pt"
    launch(PROGRAM, WORLD, out)
    found: Outcomes = torch.load(out)
    return found


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[str, Outcome]]:
    """What a single process comes to, by model."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield {model: outcome(model, None, Choice(), 0, MeshDegrees()) for model in MODELS}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_gradients_do_not_depend_on_what_is_sent_when(
    outcomes: Outcomes, alone: dict[str, Outcome], model: str, mesh: str
) -> None:
    loss, evaluated, gradients = alone[model]
    for choice in CHOICES:
        loss_here, evaluated_here, here = outcomes[model, mesh, choice.describe()]
        assert abs(loss_here - loss) <= TOLERANCE
        assert evaluated_here == pytest.approx(evaluated, rel=TOLERANCE)
        assert here.keys() == gradients.keys()
        for name, gradient in gradients.items():
            difference = (here[name] - gradient).abs().max() / gradient.abs().max()
            assert difference <= TOLERANCE, (choice, name)


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_keeping_parameters_changes_no_bit(outcomes: Outcomes, model: str, mesh: str) -> None:
    for once in (False, True):
        freed, kept = (
            outcomes[model, mesh, Choice(once, keep).describe()][2] for keep in (False, True)
        )
        assert all(torch.equal(kept[name], freed[name]) for name in freed)


def test_sockets_carry_what_is_counted(tmp_path: Path) -> None:
    """Gloo's reduce-scatter is an all-reduce underneath, and sends as much as one."""
    launch(PROGRAM, 2, tmp_path / "bytes.pt")
    carried: dict[str, int] = torch.load(tmp_path / "bytes.pt")
    mesh = MeshDegrees(shard=2)
    shape = Shape.of(WIDE.model, VOCAB)
    for choice in CHOICES:
        buffers = step_buffers(shape, mesh, choice, micro_batches=MICRO_BATCHES, compute_bytes=4)
        ring = node_traffic(buffers, mesh, ranks_per_node=1).between
        counted = ring + buffers.reduce_scatter // 2
        # At most 40 collectives, each wrapped in some messages of Gloo's own.
        assert 0 < carried[choice.describe()] - counted < 40 * 1024, choice
