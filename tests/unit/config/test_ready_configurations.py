"""configs/train: each fits the GPUs that it names, and says what a node sends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kempner.cli.config import PlannedJob
from kempner.config.loading import load
from kempner.data.order.batch_slices import micro_steps
from kempner.model.spec.memory import Situation, choose, estimate_memory, step_traffic
from kempner.model.spec.mesh import resolve_mesh
from kempner.model.spec.shape import Shape

FOLDER = Path(__file__).parents[3] / "configs/train"
READY = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "debug")

USED = 0.9
"""The share that may be filled by count, as `auto` takes it."""
LINK = 400e9 / 8
"""Bytes a second of one NDR InfiniBand link."""

MEANT = re.compile(
    r"Meant for (?P<nodes>\d+) nodes? of (?P<gpus>\d+) GPUs of (?P<gpu>80|141) GB\. "
    r"A rank needs about (?P<memory>\d+) GB"
)
SENDS = re.compile(r"node sends (?P<sent>\d+) GB to other nodes, which takes (?P<link>[\d.]+) s")


def header_of(name: str) -> str:
    lines = (FOLDER / f"{name}.toml").read_text().split("\n[run]")[0].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines)


@pytest.mark.parametrize("name", READY)
def test_it_fits_and_sends_what_its_header_says(name: str) -> None:
    """How long a step takes: tests/unit/training/plan/test_ready_plans.py."""
    header, config = header_of(name), load(FOLDER / f"{name}.toml")
    meant, sends = MEANT.search(header), SENDS.search(header)
    assert meant is not None
    nodes, vocab_size = int(meant["nodes"]), config.model.vocab_size
    gpu = int(meant["gpu"]) * 10**9
    assert vocab_size is not None
    job = PlannedJob.of(config, nodes * int(meant["gpus"]), nodes, gpu)
    train, shape = config.train, Shape.of(config.model, vocab_size)
    mesh = resolve_mesh(config, job.world)
    passes = micro_steps(train.global_batch_size, mesh.data_world, train.micro_batch_size)
    situation = Situation(shape, mesh, job.ranks_per_node, passes, 2, job.gpu_memory)
    choice = choose(config, situation)

    memory = estimate_memory(config, shape, mesh, situation.compute_bytes, choice).total
    assert memory <= USED * gpu
    assert round(memory / 1e9) == int(meant["memory"])

    if nodes == 1:
        return
    sent = step_traffic(config, situation, shape, choice).between
    assert sends is not None
    assert round(sent / 1e9) == int(sends["sent"])
    decimals = len(sends["link"].partition(".")[2])
    assert f"{sent / LINK:.{decimals}f}" == sends["link"]


def test_a_new_project_has_the_7b_configuration_as_it_is() -> None:
    template = FOLDER.parents[1] / "kempner/project/template/7b.toml"
    assert template.read_text() == (FOLDER / "7b.toml").read_text()


def test_there_is_one_for_every_size_of_a_job() -> None:
    meant = [MEANT.search(header_of(name)) for name in READY]
    sizes = {(int(found["nodes"]), int(found["gpus"])) for found in meant if found is not None}
    assert {nodes for nodes, _ in sizes} == {1, 2, 4, 8, 32}
    assert {gpus for _, gpus in sizes} == {4, 8}
