"""What of a job the ranks get, as a table."""

from __future__ import annotations

import pytest

from kempner.cluster.slurm.allocation import Allocation, allocate, avoid, without
from kempner.cluster.slurm.resources import Amount, Resources

NODES = ["node1", "node2"]


def resources(gpus: int | None, cpus: int | None = 16) -> Resources:
    return Resources(Amount(cpus, "test"), Amount(None, "nobody"), Amount(gpus, "test"))


BATCH = {"SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize(
    ("environ", "has", "wanted", "tasks", "cpus"),
    [
        (BATCH, resources(4), {}, 4, 4),
        ({**BATCH, "SLURM_CPUS_PER_TASK": "2"}, resources(4), {}, 4, 2),
        (BATCH, resources(0), {}, 4, 4),
        (BATCH, resources(None), {}, 4, 4),
        ({}, resources(4), {}, 4, 4),
        ({}, resources(0), {}, 1, 16),
        ({}, resources(None, cpus=None), {}, 1, None),
        ({"SLURM_TASKS_PER_NODE": "3(x2)"}, resources(0), {}, 3, 5),
        ({"SLURM_TASKS_PER_NODE": "3(x2)"}, resources(4), {}, 4, 4),
        (BATCH, resources(4), {"procs": 2}, 2, 8),
        (BATCH, resources(2), {"procs": 2}, 2, 8),
        (BATCH, resources(4, cpus=2), {}, 4, 1),
        (BATCH, resources(4), {"hosts": 1}, 4, 4),
        ({"SLURM_NTASKS_PER_NODE": "1"}, resources(4), {"per_task": False}, 4, 4),
        ({"SLURM_NTASKS_PER_NODE": "1"}, resources(0), {"per_task": False}, 1, 16),
        ({"SLURM_NTASKS_PER_NODE": "1"}, resources(0), {"per_task": False, "procs": 3}, 3, 5),
    ],
)
def test_ranks_are_gpus_or_tasks_or_as_configured(
    environ: dict[str, str],
    has: Resources,
    wanted: dict[str, int],
    tasks: int,
    cpus: int | None,
) -> None:
    got = allocate(environ, job="7", batch=True, nodes=NODES, resources=has, **wanted)  # type: ignore[arg-type]
    hosts = wanted.get("hosts", 2)
    assert got == Allocation("7", tuple(NODES[:hosts]), tasks, cpus, has.gpus.value or 0, True)
    assert got.size == hosts * tasks


def test_tasks_that_do_not_match_the_gpus_are_refused_with_both_numbers() -> None:
    expected = r"job 7 has --ntasks-per-node=4 but 8 GPUs per node, .*=8, or set slurm.procs"
    with pytest.raises(ValueError, match=expected):
        allocate(BATCH, job="7", batch=True, nodes=NODES, resources=resources(8))


def test_more_nodes_than_the_job_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slurm.hosts=3, but job 7 has 2 nodes"):
        allocate(BATCH, job="7", batch=True, nodes=NODES, resources=resources(4), hosts=3)


@pytest.mark.parametrize(
    ("nodes", "spare", "suspect", "at_least", "used", "reserve"),
    [
        ("ab", "", "", 2, "ab", ""),
        ("ab", "c", "", 2, "ab", "c"),
        ("ab", "c", "a", 2, "bc", "a"),
        ("ab", "c", "c", 2, "ab", "c"),
        ("ab", "cd", "ac", 2, "bd", "ac"),
        ("ab", "", "a", 2, "ba", ""),
        ("ab", "", "a", 1, "b", "a"),
        ("abc", "d", "bd", 2, "ac", "bd"),
        ("abc", "d", "bd", 3, "acb", "d"),
        ("ab", "", "ab", 1, "a", "b"),
    ],
)
def test_suspect_nodes_are_used_last(
    nodes: str, spare: str, suspect: str, at_least: int, used: str, reserve: str
) -> None:
    before = Allocation("7", tuple(nodes), 4, 4, 4, True, tuple(spare))
    after = avoid(before, suspect, at_least)
    assert ("".join(after.nodes), "".join(after.spare)) == (used, reserve)


def test_a_suspect_node_takes_the_place_of_a_lost_one_if_there_is_no_other() -> None:
    before = avoid(Allocation("7", ("a", "b", "c"), 4, 4, 4, True), "b", at_least=2)
    assert before.nodes == ("a", "c")
    after = avoid(without(before, "c"), "b", at_least=2)
    assert after.nodes == ("a", "b")
