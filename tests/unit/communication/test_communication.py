"""What is sent by which choice, and which choice is made."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kempner.config.loading import load
from kempner.config.model import ParallelismSection
from kempner.config.sections import Config
from kempner.model.spec.communication import (
    Buffers,
    Choice,
    Traffic,
    all_to_all_traffic,
    node_traffic,
    step_buffers,
)
from kempner.model.spec.memory import (
    USUAL_GPU,
    Situation,
    choose,
    usable_memory,
)
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "scripts" / "docs"))
import communication_page  # noqa: E402 - a script

CONFIG = load(ROOT / "configs/train/7b.toml")
SHAPE = Shape.of(CONFIG.model, 32000)
PARAMETERS, TABLE, BLOCK = 6_738_415_616, 32000 * 4096, 202_383_360
GPUS = 4
FLAT, HYBRID = MeshDegrees(shard=32), MeshDegrees(replicate=8, shard=4)


def traffic(mesh: MeshDegrees, choice: Choice) -> Traffic:
    """Of a step of 1024 sequences, 1 in a micro batch, on nodes of 4 GPUs."""
    micro_batches = 1024 // mesh.data_world
    buffers = step_buffers(SHAPE, mesh, choice, micro_batches=micro_batches, compute_bytes=2)
    return node_traffic(buffers, mesh, GPUS)


def test_buffers_of_7b() -> None:
    """Of a micro batch's two gathers, the embedding, the last block and the output need one."""
    freed = step_buffers(SHAPE, FLAT, Choice(), micro_batches=32, compute_bytes=2)
    once = 2 * TABLE + BLOCK + 4096
    assert freed == Buffers(32 * 2 * (2 * PARAMETERS - once), 32 * 4 * PARAMETERS, 0)
    kept = step_buffers(SHAPE, HYBRID, Choice(True, True), micro_batches=32, compute_bytes=2)
    assert kept == Buffers(2 * PARAMETERS, 4 * PARAMETERS, PARAMETERS)


def test_a_node_sends_what_leaves_it_along_the_ring() -> None:
    buffers = Buffers(all_gather=3200, reduce_scatter=6400, all_reduce=320)
    assert node_traffic(buffers, FLAT, 4) == Traffic(within=3 * 9300, between=9300)
    # A ring of 4 within each node; then 4 rings of 8 nodes, each for a quarter.
    assert node_traffic(buffers, HYBRID, 4) == Traffic(within=4 * 7200, between=4 * 560)
    # Two replicas on each of two nodes of 4 ranks: of four members of a ring, two leave a node.
    pairs = MeshDegrees(replicate=4, shard=2)
    assert node_traffic(Buffers(0, 0, 320), pairs, 4) == Traffic(within=2 * 480, between=2 * 480)
    assert node_traffic(buffers, MeshDegrees(shard=4), 8) == Traffic(8 * 7200, 0)
    assert node_traffic(buffers, MeshDegrees(shard=32), 1) == Traffic(0, 9300)


def test_7b_on_eight_nodes_sends_a_fortieth_of_what_it_did() -> None:
    """What was: everything gathered twice and reduced once for every micro batch."""
    before = 32 * (2 * 2 + 4) * PARAMETERS * 31 // 32
    choice = chosen(FLAT)
    assert (choice.reduce_once, choice.keep_parameters) == (True, True)
    assert 40 * traffic(FLAT, choice).between < before
    assert 35 * traffic(HYBRID, chosen(HYBRID)).between < before


def situation(mesh: MeshDegrees, **changes: object) -> Situation:
    usual = Situation(SHAPE, mesh, GPUS, 1024 // mesh.data_world, 2, USUAL_GPU)
    return replace(usual, **changes)  # type: ignore[arg-type]


def chosen(mesh: MeshDegrees, config: Config = CONFIG, **changes: object) -> Choice:
    return choose(config, situation(mesh, **changes))


def test_the_choice_sends_least_of_what_fits() -> None:
    """Parameters that are kept take 12 GB more, gradients that are reduced once 26 GB."""
    found = {
        gigabytes: chosen(FLAT, gpu_memory=gigabytes * 10**9) for gigabytes in (80, 64, 48, 32, 8)
    }
    assert {
        size: (choice.reduce_once, choice.keep_parameters) for size, choice in found.items()
    } == {
        80: (True, True),
        64: (True, False),
        48: (False, True),
        32: (False, False),
        8: (False, False),
    }
    assert re.search(r"it fits 72.0 GB \(0.9 of the GPU\) with 5[0-9.]+ GB$", found[80].reason)
    assert re.search(r"even so needs 2[0-9.]+ GB of 7.2 GB", found[8].reason)


def test_what_is_configured_is_obeyed() -> None:
    sections = [
        ({"reduce_gradients": "step", "reshard_after_forward": "always"}, Choice(True, False)),
        (
            {"reduce_gradients": "micro_batch", "reshard_after_forward": "never"},
            Choice(False, True),
        ),
        ({"reduce_gradients": "micro_batch"}, Choice(False, True)),
        ({"reshard_after_forward": "always"}, Choice(True, False)),
    ]
    for section, expected in sections:
        parallelism = ParallelismSection.model_validate(section)
        config = CONFIG.model_copy(update={"parallelism": parallelism})
        choice = chosen(FLAT, config)
        assert (choice.reduce_once, choice.keep_parameters) == (
            expected.reduce_once,
            expected.keep_parameters,
        )
        assert (choice.reason == "the configuration says so") is (len(section) == 2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu_memory": None}, "the CPU ranks of a node share"),
        ({"shape": None}, "only its code knows"),
        ({"mesh": MeshDegrees()}, "nothing to send"),
    ],
)
def test_in_doubt_it_is_what_takes_least_memory(changes: dict[str, object], why: str) -> None:
    choice = choose(CONFIG, replace(situation(FLAT), **changes))  # type: ignore[arg-type]
    assert (choice.reduce_once, choice.keep_parameters) == (False, False)
    assert why in choice.reason


def test_one_micro_batch_needs_no_memory_to_reduce_once() -> None:
    assert not chosen(FLAT, micro_batches=1).reduce_once


def test_another_driver_changes_nothing() -> None:
    assert usable_memory(85_029_158_912) == usable_memory(84_900_000_000) == 80 * 10**9
    assert usable_memory(6 * 10**9) == 6 * 10**9


def test_the_page_has_the_table_of_today() -> None:
    text = communication_page.PAGE.read_text()
    hint = "run `python scripts/docs/communication_page.py`"
    assert text == communication_page.page(text), hint


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("dimension", ["replicate", "shard"])
def test_in_an_all_to_all_every_two_ranks_exchange(dimension: str, per_node: int) -> None:
    mesh, size = MeshDegrees(replicate=4, shard=4), 4 * 100
    groups = {rank: rank // 4 if dimension == "shard" else rank % 4 for rank in range(mesh.world)}
    sent = {"within": 0, "between": 0}
    for rank in range(per_node):  # those of the first node
        for other, group in groups.items():
            if other != rank and group == groups[rank]:
                sent["within" if other < per_node else "between"] += size // 4
    assert all_to_all_traffic(size, dimension, mesh, per_node) == Traffic(**sent)
