"""When nodes that were left out are taken back, as a table; how long restarts took."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kempner.run.record.history import RunHistory
from kempner.supervisor.nodes.changes import (
    DOUBLINGS,
    SETTLED,
    UNMEASURED_RESTART,
    GrowSituation,
    IdleNode,
    decide_growth,
    last_growth,
    restart_seconds,
    times_lost,
    times_taken_back,
)

WELL = IdleNode("node2", 300.0)
NOW = GrowSituation(
    used=3,
    missing=1,
    idle=(WELL,),
    training=True,
    since_growth=None,
    restart_takes=4.0,
    left=None,
    wait=300.0,
)


def idle(well_for: float | None, returns: int = 0, barred: bool = False) -> IdleNode:
    return IdleNode("node2", well_for, returns, barred)


def joined(well_for: float, left: float | None = None, lost: int = 0) -> IdleNode:
    return IdleNode("node7", well_for, lost, joined=True, left=left)


@pytest.mark.parametrize(
    ("now", "nodes", "words"),
    [
        (NOW, ["node2"], "node2 is well again: from 3 to 4 nodes"),
        (replace(NOW, missing=0), [], "no node is missing"),
        (replace(NOW, training=False), [], "do not all train"),
        (replace(NOW, idle=()), [], "well for long enough"),
        (replace(NOW, idle=(idle(299.9),)), [], "well for long enough"),
        (replace(NOW, idle=(idle(None),)), [], "well for long enough"),
        (replace(NOW, idle=(idle(9e9, barred=True),)), [], "well for long enough"),
        # twice as long for each time that it came back in vain
        (replace(NOW, idle=(idle(599.9, returns=1),)), [], "well for long enough"),
        (replace(NOW, idle=(idle(600.0, returns=1),)), ["node2"], ""),
        (replace(NOW, idle=(idle(2399.9, returns=3),)), [], "well for long enough"),
        (replace(NOW, idle=(idle(300.0 * 2**DOUBLINGS, returns=5000),)), ["node2"], ""),
        # not more often than at 2 % of the time
        (replace(NOW, since_growth=199.9), [], "taken in 200 s ago, less than 200 s"),
        (replace(NOW, since_growth=200.0), ["node2"], ""),
        # a third of the nodes for 36 s is three times what 3 nodes lose in 4 s
        (replace(NOW, left=35.9), [], "would not pay in the 36 s that are left"),
        (replace(NOW, left=36.0), ["node2"], ""),
        (replace(NOW, left=-5.0), [], "would not pay"),
        (replace(NOW, left=36.0, used=300), [], "would not pay"),
        # as many as are missing, those first that are trusted most
        (replace(NOW, idle=(idle(9e9, returns=2), IdleNode("node5", 300.0))), ["node5"], ""),
        (replace(NOW, missing=2, idle=(WELL, IdleNode("node5", 1e3), IdleNode("node6", 0.0))),
         ["node2", "node5"], "node2, node5 are well again: from 3 to 5 nodes"),
        # one of another job waits for those that come with it, and longer once it was lost
        (replace(NOW, idle=(joined(SETTLED),)), ["node7"], "node7 has joined: from 3 to 4 nodes"),
        (replace(NOW, idle=(joined(SETTLED - 0.1),)), [], "well for long enough"),
        (replace(NOW, idle=(joined(34.9, lost=1),)), [], "well for long enough"),
        (replace(NOW, idle=(joined(35.0, lost=1),)), ["node7"], ""),
        (replace(NOW, idle=(joined(94.9, lost=2),)), [], "well for long enough"),
        (replace(NOW, missing=2, idle=(WELL, joined(SETTLED))),
         ["node2", "node7"], "node2 is well again; node7 has joined: from 3 to 5 nodes"),
        # its own job's end counts, and that of the supervisor's job
        (replace(NOW, idle=(joined(SETTLED, left=35.9),)), [], "in the 36 s that are left"),
        (replace(NOW, idle=(joined(SETTLED, left=36.0),)), ["node7"], ""),
        (replace(NOW, left=35.9, idle=(joined(SETTLED, left=9e9),)), [], "would not pay"),
        (replace(NOW, missing=2, idle=(joined(9.0, left=20.0), joined(9.0, left=20.0))),
         ["node7", "node7"], ""),
    ],
)  # fmt: skip
def test_which_nodes_are_taken_back(now: GrowSituation, nodes: list[str], words: str) -> None:
    decision = decide_growth(now)
    assert list(decision.nodes) == nodes
    assert words in decision.reason


def line(event: str, attempt: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": event, "attempt": attempt, "time": time, **fields}


def ended(attempt: int, time: float) -> dict[str, Any]:
    told = {"code": 1, "reason": "so", "culprit": None, "exits": {}, "seconds": None}
    return line("attempt_ended", attempt, time, **told)


def ready(attempt: int, time: float) -> dict[str, Any]:
    return line("ready_to_train", attempt, time, step=1, device="cpu", reached={})


def test_what_a_restart_takes_is_measured_where_the_same_supervisor_restarts() -> None:
    back = {"nodes": ["node2"], "reason": "so"}
    lines = [
        ready(1, 10.0),
        ended(1, 100.0),
        line("restarting", 1, 100.5, reason="so"),
        ready(2, 104.0),
        ended(2, 200.0),
        line("nodes_taken_back", 2, 200.2, **back),
        ready(3, 202.0),
        ended(3, 300.0),  # then the job is requeued, and waits
        ready(4, 5000.0),
    ]
    history = RunHistory(lines)
    assert restart_seconds(history) == 3.0
    assert restart_seconds(RunHistory(lines[:2])) == UNMEASURED_RESTART
    assert (last_growth(history, 200.2), times_taken_back(history)) == (200.2, {"node2": 1})
    assert last_growth(history, 200.3) is None  # that was another supervisor
    assert last_growth(RunHistory(), 0.0) is None


def test_nodes_that_have_joined_count_as_a_change_and_those_that_were_lost_as_lost() -> None:
    left = {"nodes": ["node7", "node8"], "reason": "so"}
    lines = [
        ready(1, 10.0),
        ended(1, 100.0),
        line("nodes_joined", 1, 100.1, nodes=["node7", "node8"], jobs=["8", "9"]),
        ready(2, 102.0),
        ended(2, 200.0),
        line("nodes_left", 2, 200.1, **left),
        ready(3, 204.0),
        line("nodes_left", 3, 300.1, nodes=["node7"], reason="so", lost=True),
    ]
    history = RunHistory(lines)
    assert restart_seconds(history) == 3.0
    assert (last_growth(history, 0.0), times_lost(history)) == (100.1, {"node7": 1})
