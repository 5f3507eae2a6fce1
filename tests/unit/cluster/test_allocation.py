"""What of a job the ranks get, as a table."""

from __future__ import annotations

import pytest

from kempner.cluster.slurm.allocation import Allocation, allocate, avoid, without
from kempner.cluster.slurm.job import NodeShare
from kempner.cluster.slurm.resources import CONFIGURED_GPUS, Amount, NodeResources

NODES = ["node1", "node2"]


def resources(gpus: int | None, cpus: int | None = 16) -> NodeResources:
    return NodeResources(Amount(cpus, "test"), Amount(None, "test"), Amount(gpus, "test"))


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
        (BATCH, resources(4, cpus=2), {}, 4, 0),
        ({**BATCH, "SLURM_CPUS_PER_TASK": "8"}, resources(4, cpus=32), {}, 4, 8),
        (BATCH, resources(4), {"hosts": 1}, 4, 4),
        ({"SLURM_NTASKS_PER_NODE": "1"}, resources(4), {"per_task": False}, 4, 4),
        # torchrun.sh as it is shipped: one task of all CPUs starts four ranks
        ({"SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "32"}, resources(4, cpus=32),
         {"per_task": False}, 4, 8),
        ({"SLURM_NTASKS_PER_NODE": "1"}, resources(0), {"per_task": False}, 1, 16),
        ({"SLURM_NTASKS_PER_NODE": "1"}, resources(0), {"per_task": False, "procs": 3}, 3, 5),
    ],
)  # fmt: skip
def test_ranks_are_gpus_or_tasks_or_as_configured(
    environ: dict[str, str],
    has: NodeResources,
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


def test_nodes_that_are_suspect_no_more_are_used_again_after_the_others() -> None:
    before = avoid(Allocation("7", ("a", "b", "c", "d"), 4, 4, 4, True), "bc", at_least=2)
    assert avoid(before, "", at_least=2).nodes == ("a", "d")
    assert avoid(before, "", at_least=2, wanted=3).nodes == ("a", "d", "b")
    assert avoid(before, "b", at_least=2, wanted=4).nodes == ("a", "d", "c")
    assert avoid(before, "bc", at_least=2, wanted=4).nodes == ("a", "d")


UNEVEN = {"node1": NodeShare(cpus=16, gpus=8), "node2": NodeShare(cpus=8, gpus=4)}


def test_nodes_with_different_numbers_of_gpus_have_as_many_ranks() -> None:
    got = allocate(
        {"SLURM_GPUS": "12"},
        job="7",
        batch=True,
        nodes=NODES,
        resources=resources(8),
        shares=UNEVEN,
    )
    assert (got.size, got.cpus_per_task) == (12, 1)  # no more than on the node with fewer CPUs
    assert got.places() == {"node1": range(8), "node2": range(8, 12)}
    assert got.steps(got.nodes) == [["node1"], ["node2"]]
    assert got.gpu_options(["node2"], "22.05") == ("--gpus=4",)
    for slurm in ("", "24.11", "26.05", "27.02"):
        assert got.gpu_options(["node2"], slurm) == ("--gpus-per-node=4",)
    assert got.why_no_tasks == "its nodes have different numbers of GPUs (8, 4)"
    assert without(got, ["node1"]).places() == {"node2": range(4)}


@pytest.mark.parametrize(
    ("environ", "has", "wanted", "per_node"),
    [
        ({}, resources(8), {"procs": 2}, (2, 4)),  # the user's word, on GPUs that all nodes have
        (
            {},
            NodeResources(Amount(16, "t"), Amount(None, "t"), Amount(4, CONFIGURED_GPUS)),
            {},
            (4, 4),
        ),
        ({}, resources(8), {"hosts": 1}, (8, 8)),
    ],
)
def test_what_is_configured_is_the_same_on_all_nodes(
    environ: dict[str, str], has: NodeResources, wanted: dict[str, int], per_node: tuple[int, int]
) -> None:
    got = allocate(
        environ,
        job="7",
        batch=True,
        nodes=NODES,
        resources=has,
        shares=UNEVEN,
        **wanted,  # type: ignore[arg-type]
    )
    assert not got.uneven
    assert (got.tasks_per_node, got.gpus_per_node) == per_node


@pytest.mark.parametrize(
    ("environ", "shares", "per_task", "said"),
    [
        ({}, UNEVEN, False, "torchrun needs as many GPUs on every node, but node1 has 8, node2"),
        ({"SLURM_NTASKS_PER_NODE": "4"}, UNEVEN, True, "--ntasks-per-node=4, but node1 has 8"),
        ({}, {**UNEVEN, "node2": NodeShare(8, 0)}, True, "no GPU on some of its nodes"),
    ],
)
def test_uneven_nodes_that_cannot_be_used_are_refused(
    environ: dict[str, str], shares: dict[str, NodeShare], per_task: bool, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        allocate(
            environ, job="7", batch=True, nodes=NODES, resources=resources(8), shares=shares,
            per_task=per_task,
        )  # fmt: skip


def test_cpus_that_are_fewer_than_the_ranks_of_a_node_are_not_asked_for() -> None:
    """`--gpus=8 --ntasks=8` on two nodes: Slurm 22.05 gave 7 CPUs on one and 1 on the other."""
    shares = {"node1": NodeShare(7, 4), "node2": NodeShare(1, 4)}
    environ = {"SLURM_TASKS_PER_NODE": "7,1"}
    got = allocate(
        environ, job="7", batch=True, nodes=NODES, resources=resources(4, 7), shares=shares
    )
    assert (got.tasks_per_node, got.cpus_per_task) == (4, 0)
    assert got.why_no_tasks == "a node has fewer CPUs than ranks"
