"""The arithmetic of how long a step takes, and the table that it takes its figures from."""

from __future__ import annotations

import pytest

from kempner.model.spec.communication import Traffic, ring_traffic
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.step_time import (
    GPUS,
    Assumptions,
    GpuModel,
    Load,
    find_gpu,
    peak_flops_of,
    step_time,
)
from kempner.run.process.exit_codes import UsageError

GPU = GpuModel("toy", 10**9, flops=100.0, memory_rate=10.0, link_rate=4.0, source="none")
GIVEN = Assumptions(network=2.0, compute_share=0.5, memory_share=0.5, network_share=0.5)
PRODUCTS = ((100, 1, 1),)
"""Of two seconds; read and written in 0.2."""
PASSES = ((0, 5, 3), (10, 10, 1))
"""Three of one second, and one of two, which computes for 0.2."""


@pytest.mark.parametrize(
    ("loads", "spent", "bound"),
    [
        ([Load(1, PRODUCTS, 0, 0, 0)], (2, 0, 0, 0), "compute"),
        ([Load(3, PRODUCTS, 0, 0, 0)], (6, 0, 0, 0), "compute"),
        ([Load(1, PRODUCTS + PASSES, 0, 0, 0)], (2, 5, 0, 0), "memory"),
        # Hidden behind two seconds, or not all of it.
        ([Load(1, PRODUCTS, 4, 2, 0)], (2, 0, 0, 0), "compute"),
        ([Load(1, PRODUCTS, 4, 5, 0)], (2, 0, 0, 3), "between_nodes"),
        ([Load(1, PRODUCTS, 10, 2, 0)], (2, 0, 3, 0), "within_node"),
        # What a tensor group sends is waited for, and hides the rest meanwhile.
        ([Load(1, PRODUCTS, 0, 5, 4)], (2, 0, 2, 1), "compute"),
        # What is sent in one part is not hidden by what is computed in another.
        (
            [Load(1, (), 0, 5, 0), Load(1, PRODUCTS * 9, 0, 0, 0)],
            (18, 0, 0, 5),
            "compute",
        ),
    ],
)
def test_a_step_takes_what_nothing_hides(
    loads: list[Load], spent: tuple[float, ...], bound: str
) -> None:
    time = step_time(loads, GPU, GIVEN)
    found = (time.compute, time.memory, time.within_node, time.between_nodes)
    assert found == pytest.approx(spent)
    assert time.total == pytest.approx(sum(spent))
    assert time.bound == bound


def test_every_gpu_has_figures_of_the_right_size_and_a_source() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert 10e9 <= gpu.memory <= 300e9
        assert 1e14 <= gpu.flops <= 1e16
        assert 5e11 <= gpu.memory_rate <= 1e13
        assert 1e10 <= gpu.link_rate <= 1e12
        assert "data sheet" in gpu.source


def test_a_gpu_is_found_by_its_name_in_any_case() -> None:
    assert find_gpu("h200").name == "H200"
    assert find_gpu("A100").memory == 80 * 10**9
    assert find_gpu("a100-40gb").memory == 40 * 10**9
    with pytest.raises(UsageError, match="did you mean MI300X"):
        find_gpu("MI300")
    assert peak_flops_of("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_of("Tesla T4") is None


def test_a_ring_sends_along_its_dimension() -> None:
    mesh = MeshDegrees(replicate=2, shard=2, tensor=2)
    # Two nodes of four: replicas are on different ones, all else is within.
    assert ring_traffic(80, "tensor", mesh, 4) == Traffic(within=160, between=0)
    assert ring_traffic(80, "shard", mesh, 4) == Traffic(within=160, between=0)
    assert ring_traffic(80, "replicate", mesh, 4) == Traffic(within=0, between=160)
    assert ring_traffic(80, "world", mesh, 4) == Traffic(within=210, between=70)
