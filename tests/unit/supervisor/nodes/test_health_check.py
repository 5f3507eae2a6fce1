"""Who is unfit, by what all have told: tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kempner.cluster.machine import OPEN_FILES, ROOM, SKEW
from kempner.cluster.network.interfaces import Interface
from kempner.probe.node import SITE_CHECK, CodeIdentity, ProbedMemory, ProbeResult
from kempner.supervisor.nodes.exclusion import Diagnosis, diagnose, health_problems

DURING = (1000.0, 1002.0)
GIB = 2**30
IB0 = Interface("ib0", 32, True, "10.10.0.11/24")
EM4 = Interface("em4", 1, True, "10.20.0.11/24")
NODES = ["node1", "node2", "node3"]
NEEDED = OPEN_FILES[0] + OPEN_FILES[1] * 64


def vitals(node: str = "node1", **changes: Any) -> ProbeResult:
    well: dict[str, Any] = {
        "node": node,
        "time": 1001.0,
        "memory": ProbedMemory(100 * GIB, 128 * GIB),
        "disk_free": {"/tmp": GIB, "/dev/shm": GIB},
        "open_files": None,
        "interface": IB0,
        "troubles": {},
    }
    return ProbeResult(**{**well, **changes})


@pytest.mark.parametrize(
    ("changes", "about", "words"),
    [
        ({}, None, ""),
        (
            {"memory": ProbedMemory(GIB, 128 * GIB)},
            "memory",
            "1024 MiB of its 131072 MiB memory is free",
        ),
        ({"disk_free": {"/tmp": ROOM}}, None, ""),
        ({"disk_free": {"/tmp": ROOM - 1}}, "/tmp", "/tmp has 31 MiB left"),
        ({"disk_free": {"/dev/shm": 0}}, "/dev/shm", "/dev/shm has 0 MiB left"),
        ({"open_files": NEEDED}, None, ""),
        ({"open_files": NEEDED - 1}, "open files", f"a rank of 64 needs {NEEDED}"),
        ({"time": DURING[0] - SKEW}, None, ""),
        ({"time": DURING[0] - SKEW - 1}, "clock", "its clock is 61 s behind"),
        ({"time": DURING[1] + SKEW}, None, ""),
        ({"time": DURING[1] + 3600}, "clock", "its clock is 3600 s ahead"),
        ({"troubles": {"interface": "ib0 is down"}}, "interface", "ib0 is down"),
    ],
)
def test_what_is_wrong_with_a_node(changes: dict[str, Any], about: str | None, words: str) -> None:
    found = health_problems(vitals(**changes), DURING, ranks=64)
    assert list(found) == ([] if about is None else [about])
    assert words in "".join(found.values())


def examined(*told: ProbeResult, unseen: Mapping[str, str] | None = None) -> Diagnosis:
    return diagnose(NODES, told, unseen or {}, DURING, 64)


def test_nodes_that_are_well() -> None:
    assert examined(*map(vitals, NODES)) == Diagnosis({})


def test_each_unfit_node_has_all_of_its_reasons() -> None:
    sick = vitals("node2", memory=ProbedMemory(0, 128 * GIB), time=0.0)
    unseen = {"node3": "files that it writes are not visible"}
    found = examined(vitals("node1"), sick, vitals("node3"), unseen=unseen).unfit
    assert set(found) == {"node2", "node3"}
    assert "0 MiB of its" in found["node2"]
    assert "its clock is 1000 s behind" in found["node2"]
    assert found["node3"] == "files that it writes are not visible"


def test_a_node_that_does_not_answer_is_unfit() -> None:
    assert examined(vitals("node1"), vitals("node3")).unfit == {"node2": "it does not respond"}


def test_what_all_nodes_have_is_no_reason_to_leave_one_out() -> None:
    full = {"/tmp": 0}
    found = examined(*(vitals(node, disk_free=full) for node in NODES))
    assert found == Diagnosis({}, ("/tmp has 0 MiB left",))


def test_a_check_that_runs_nowhere_says_nothing_about_a_node() -> None:
    assert examined() == Diagnosis({}, ("the health check did not run on any node",))


def test_the_node_on_another_network_than_the_others_is_the_odd_one() -> None:
    odd = vitals("node2", interface=EM4)
    found = examined(vitals("node1"), odd, vitals("node3"))
    assert found.unfit == {"node2": "it has no interface on the network of the other nodes"}
    assert examined(*(vitals(node, interface=EM4) for node in NODES)) == Diagnosis({})


def test_a_node_with_other_code_than_the_rest_is_unfit() -> None:
    ours, other = (CodeIdentity("3.11.2", digit * 64) for digit in "ab")
    told = [vitals(node, code=other if node == "node2" else ours) for node in NODES]
    (reason,) = (found := examined(*told)).unfit.values()
    assert list(found.unfit) == ["node2"]
    assert "it runs kempner's code bbbbbbbb on Python 3.11.2, and the other nodes" in reason


def test_what_the_sites_own_check_says_counts_on_all_nodes() -> None:
    troubles = {SITE_CHECK: "hooks.before_start failed there: exit status 1"}
    found = examined(*(vitals(node, troubles=troubles) for node in NODES))
    assert found == Diagnosis(dict.fromkeys(NODES, troubles[SITE_CHECK]))
    (node,) = NODES[:1]
    assert diagnose([node], [vitals(node, troubles=troubles)], {}, DURING, 1).unfit == {
        node: troubles[SITE_CHECK]
    }


@pytest.mark.parametrize(
    ("host", "others", "unfit", "warnings"),
    [
        (-300.0, 0.0, {"node1": "its clock is 300 s behind"}, ()),
        (0.0, 0.0, {}, ()),
        (0.0, 302.0, dict.fromkeys(("node2", "node3"), "its clock is 300 s ahead"), ()),
        (302.0, 302.0, {}, ("its clock is 300 s ahead",)),  # it is the controller's that is wrong
    ],
)
def test_the_controllers_clock_says_whose_is_wrong(
    host: float, others: float, unfit: dict[str, str], warnings: tuple[str, ...]
) -> None:
    """The supervisor runs on node1, and what it asks is timed by the controller."""
    rest = [vitals(node, time=DURING[0] + others) for node in NODES[1:]]
    found = examined(vitals(time=DURING[0] + host), *rest)
    assert (found.unfit, found.warnings) == (unfit, warnings)
