"""Which nodes a requeued job is kept away from: who is suspect now, never so that it is held."""

from __future__ import annotations

from typing import Any

import pytest

from kempner.cluster.slurm.job import eligible, gpu_types, satisfies
from kempner.run.record.history import RunHistory
from kempner.supervisor.slurm.job_nodes import Exclusion, choose_excluded, excluded_by_user


def requeued(job: str, *without: str) -> dict[str, Any]:
    return {"event": "requeued", "step": 7, "job": job, "without": list(without)}


@pytest.mark.parametrize(
    ("excluded", "events", "own"),
    [
        ([], [], ()),
        (["node8"], [], ("node8",)),
        (["node8", "node2"], [requeued("7", "node2")], ("node8",)),
        (["node8", "node2"], [requeued("6", "node2")], ("node8", "node2")),  # submitted with it
        (["node2", "node3"], [requeued("7", "node2"), requeued("7", "node3")], ()),
    ],
)
def test_what_requeues_have_added_is_not_the_users(
    excluded: list[str], events: list[dict[str, Any]], own: tuple[str, ...]
) -> None:
    assert excluded_by_user(excluded, RunHistory(events), "7") == own


SIX = {f"node{n}" for n in range(1, 7)}


@pytest.mark.parametrize(
    ("bad", "suspect", "candidates", "without"),
    [
        ([], [], SIX, ()),
        (["node2"], [], SIX, ("node2",)),
        ([], ["node2"], SIX, ("node2",)),  # nothing failed there this time
        (["node2"], ["node3"], SIX, ("node2", "node3")),
        (["node2"], ["node3", "node4"], SIX, ("node2",)),  # four are needed
        (["node2", "node3", "node4"], [], SIX, ()),
        (["node9"], [], SIX, ("node9",)),
        (["node2"], ["node3"], None, ()),  # Slurm does not say: it might be held for good
    ],
)
def test_as_many_nodes_are_left_as_are_needed(
    bad: list[str], suspect: list[str], candidates: set[str] | None, without: tuple[str, ...]
) -> None:
    assert choose_excluded(bad, suspect, candidates, needed=4) == without


def test_all_of_it_is_told_once() -> None:
    assert Exclusion(("node2", "node8"), ("node8",)).nodes == ["node8", "node2"]


NODES = [
    {"NodeName": "a", "AvailableFeatures": "rack1,icelake", "Gres": "gpu:h100:4(S:0-1)"},
    {
        "NodeName": "b",
        "AvailableFeatures": "rack2",
        "ActiveFeatures": "rack2",
        "Gres": "gpu:a100:8",
    },
    {"NodeName": "c", "AvailableFeatures": "(null)", "Gres": "(null)"},
]


@pytest.mark.parametrize(
    ("features", "resources", "found"),
    [
        ("", "", {"a", "b", "c"}),
        ("", "gres:gpu:4", {"a", "b", "c"}),  # of any type; how many there are is not judged
        ("", "gres:gpu:h100:4", {"a"}),
        ("", "gres/gpu:a100=2", {"b"}),
        ("rack1", "", {"a"}),
        ("rack1&icelake", "", {"a"}),
        ("rack1&rack2", "", set()),
        ("rack1|rack2", "", {"a", "b"}),
        ("rack2", "gres:gpu:h100:4", set()),
        ("[rack1|rack2]", "", None),  # all nodes the same one
        ("rack1*2&rack2*2", "", None),
    ],
)
def test_where_a_job_can_run(features: str, resources: str, found: set[str] | None) -> None:
    assert eligible(features, resources, NODES) == found


def test_spellings() -> None:
    assert gpu_types("gres:gpu:1") == set()
    assert gpu_types("gpu:h100:4(S:0-1),gpu:a100:2") == {"h100", "a100"}
    assert satisfies("a & b", ["a", "b"]) is True
    assert satisfies("(a|b)&c", ["a", "c"]) is None
