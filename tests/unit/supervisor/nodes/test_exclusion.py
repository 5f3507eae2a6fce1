"""Which nodes the ledger accuses, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from kempner.run.record.history import RunHistory
from kempner.supervisor.nodes.exclusion import is_machine_error, suspects

NOW, DAY = 1_000_000.0, 86_400.0


def failed(attempt: int, node: str | None, raised: str = "", ago: float = 60.0) -> dict[str, Any]:
    where = {} if node is None else {"node": node}
    what = {"step": 7, "committed": None, "raised": raised}
    return {"event": "attempt_failed", "attempt": attempt, **what, **where, "time": NOW - ago}


def named(node: str, reason: str, ago: float = 60.0) -> dict[str, Any]:
    return {"event": "suspect", "node": node, "reason": reason, "time": NOW - ago}


def lied(node: str) -> list[dict[str, Any]]:
    found = {"step": 9, "part": "update", "ranks": [1], "nodes": [node], "sure": True, "to": 4}
    why = {"reason": "it lies", "time": NOW - 60.0}
    return [{"event": "corruption_found", **found, **why}, named(node, "it lies")]


def taken_back(node: str) -> dict[str, Any]:
    before = {"event": "nodes_taken_back", "attempt": 1}
    return {**before, "nodes": [node], "reason": "well", "time": NOW - 60.0}


ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("events", "accused"),
    [
        ([], {}),
        ([named("node2", "computes wrong")], {"node2": "computes wrong"}),
        ([named("node2", "computes wrong", ago=DAY + 1)], {}),
        ([named("node2", "one"), named("node2", "two")], {"node2": "two"}),
        ([named("node2", "one"), named("node3", "two")], {"node2": "one", "node3": "two"}),
        ([failed(1, "node2", ECC)], {"node2": ECC}),
        ([failed(1, "node2", "ValueError: no")], {}),
        (
            [failed(1, "node2"), failed(2, "node2")],
            {"node2": "its ranks failed first in attempts 1 and 2"},
        ),
        ([failed(1, "node2"), failed(2, "node3")], {}),
        ([named("node2", "no room"), named("node3", "two"), taken_back("node2")], {"node3": "two"}),
        ([taken_back("node2"), failed(2, "node3")], {}),
        ([taken_back("node2"), failed(3, "node2")], {}),  # an attempt later: it may be chance
        (
            [taken_back("node2"), failed(2, "node2")],
            {"node2": "its ranks failed first as soon as it was taken back"},
        ),
        ([named("node2", "one"), taken_back("node2"), named("node2", "two")], {"node2": "two"}),
        ([failed(1, "node2"), failed(2, "node3"), failed(3, "node2")], {}),
        ([failed(1, "node2"), failed(3, "node2")], {}),
        ([failed(1, "node2", ago=DAY + 1), failed(2, "node2")], {}),
        ([failed(1, None), failed(2, None)], {}),
        ([failed(1, None, ECC)], {}),
        (
            [failed(1, "node2"), {"event": "saved", "time": NOW}, failed(2, "node2")],
            {"node2": "its ranks failed first in attempts 1 and 2"},
        ),
    ],
)
def test_what_the_ledger_says_against_a_node(
    events: list[dict[str, Any]], accused: dict[str, str]
) -> None:
    found = suspects(RunHistory(events), NOW, DAY)
    assert {node: suspect.reason for node, suspect in found.items()} == accused


@pytest.mark.parametrize(
    ("events", "no_check_refutes_it"),
    [
        ([named("node2", "no room")], False),
        ([failed(1, "node2"), failed(2, "node2")], True),
        ([failed(1, "node2"), failed(2, "node2"), named("node2", "no room")], False),
        ([failed(1, "node2", ECC), named("node2", "no room")], True),
        ([taken_back("node2"), failed(2, "node2")], False),  # it must be well for twice as long
        ([taken_back("node2"), failed(2, "node2", ECC)], True),
        ([named("node2", "no room"), failed(2, "node2", ECC)], True),
        ([*lied("node2"), failed(2, "node2"), named("node2", "no room")], True),
        ([*lied("node3"), named("node2", "no room")], False),
        ([*lied("node2"), taken_back("node2"), named("node2", "no room")], False),
    ],
)
def test_what_a_health_check_refutes(
    events: list[dict[str, Any]], no_check_refutes_it: bool
) -> None:
    assert suspects(RunHistory(events), NOW, DAY)["node2"].failed is no_check_refutes_it


def test_what_may_be_chance_is_no_proof() -> None:
    twice = [failed(1, "node2"), failed(2, "node2")]
    for events, proven in (
        (twice, False),
        ([failed(1, "node2", ECC)], True),
        ([named("node2", "computes wrong"), *twice], True),
        ([*twice, named("node2", "computes wrong")], True),
    ):
        assert suspects(RunHistory(events), NOW, DAY)["node2"].proven is proven


def test_a_ledger_of_an_earlier_version_names_no_node() -> None:
    assert suspects(RunHistory([failed(1, None), failed(2, None)]), NOW, DAY) == {}


@pytest.mark.parametrize(
    ("words", "machine"),
    [
        (ECC, True),
        ("RuntimeError: CUDA error: unspecified launch failure", False),
        ("RuntimeError: CUDA error: the launch timed out and was terminated", False),
        ("RuntimeError: HIP error: uncorrectable ECC error encountered", True),
        ("RuntimeError: HIP error: unspecified launch failure", False),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB", False),
        ("RuntimeError: HIP error: invalid device function", False),
        ("RuntimeError: HIP error: hipErrorIllegalAddress", False),
        ("HW Exception by GPU node-4 (Agent handle: 0x5) reason :GPU Hang", True),
        ("Memory access fault by GPU node-2 on address 0x7f. Reason: Unknown.", False),
        ("HSA_STATUS_ERROR_OUT_OF_RESOURCES: the runtime failed to allocate", False),
        ("HSA_STATUS_ERROR: a generic error has occurred", True),
        ("RuntimeError: CUDA error: an unknown error", True),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("RuntimeError: CUDA error: invalid argument", False),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", True),
        ("ValueError: the index is out of range", False),
        ("KeyError: 'decc'", False),
    ],
)
def test_a_broken_gpu_is_told_from_a_broken_program(words: str, machine: bool) -> None:
    assert is_machine_error(words) is machine
