"""Decides whether ranks that run on fewer nodes than at first stop, and start again on more: pure.

A change of the world costs all nodes a restart, and brings the nodes that come back. It must pay,
and a node that was taken back and failed again is trusted later each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

from kempner.run.record.events import (
    AttemptEnded,
    NodesJoined,
    NodesLeft,
    NodesTakenBack,
    RankReady,
    Restarting,
)
from kempner.run.record.history import RunHistory

LARGEST_SHARE = 0.02
"""Of the time of a supervisor, the most that changes of the world may take, after the first one."""

PAYS = 3.0
"""How many times its cost a change must bring, in the time that is left of the job."""

DOUBLINGS = 10
"""The most times that the seconds for which a node must be well are doubled: some days."""

UNMEASURED_RESTART = 60.0
"""Seconds that a restart is taken for, as long as none was measured."""

SETTLED = 5.0
"""Seconds that a node of another job waits for others that join at the same time."""

LOST = 30.0
"""Seconds that it waits besides after it was lost once; 90 after twice, and so on."""

REMEMBERED = 5
"""Restarts of which the median counts."""


@dataclass(frozen=True)
class IdleNode:
    """A node of the job that has no ranks.

    `well_for` is the number of seconds for which it has answered that nothing is wrong with it,
    None if it does not. `returns` counts how often it was taken back before. `barred` says that its
    ranks failed there, or that other runs suspect it: no check refutes that.

    One that has `joined` from another job is there for `left` more seconds (None: not known), and
    its `returns` are the times that it was lost before.
    """

    name: str
    well_for: float | None
    returns: int = 0
    barred: bool = False
    joined: bool = False
    left: float | None = None


@dataclass(frozen=True)
class GrowSituation:
    """The ranks run on `used` nodes, and `missing` ones are wanted besides.

    `training` says that all ranks are at their steps, and that neither a stop nor a failure is
    under way. `since_growth` is the number of seconds since nodes were taken back last, None if
    none ever were, `restart_takes` what a restart takes, `left` what is left until the ranks have
    to stop for the end of the job, None without one; `wait` is `supervise.grow_after`.
    """

    used: int
    missing: int
    idle: tuple[IdleNode, ...]
    training: bool
    since_growth: float | None
    restart_takes: float
    left: float | None
    wait: float


@dataclass(frozen=True)
class GrowDecision:
    """The nodes to take back, none for not now; and why."""

    nodes: tuple[str, ...]
    reason: str


def decide_growth(now: GrowSituation) -> GrowDecision:
    """Whether the ranks are to stop, to start again on more nodes."""
    if now.missing <= 0:
        return _not("no node is missing")
    if not now.training:
        return _not("the ranks do not all train just now")
    back = trusted(now.idle, now.wait)[: now.missing]
    if not back:
        return _not("no node has been well for long enough")
    apart = now.restart_takes / LARGEST_SHARE
    if now.since_growth is not None and now.since_growth < apart:
        return _not(f"nodes were taken in {now.since_growth:.0f} s ago, less than {apart:.0f} s")
    cost = now.restart_takes * now.used
    if sum(_seconds_of_use(node, now.left) for node in back) < PAYS * cost:
        left = min(_seconds_of_use(node, now.left) for node in back)
        return _not(f"it would not pay in the {left:.0f} s that are left of a job's time")
    what, more = _names_and_verb(back), now.used + len(back)
    return GrowDecision(tuple(n.name for n in back), f"{what}: from {now.used} to {more} nodes")


def trusted(idle: tuple[IdleNode, ...], wait: float) -> tuple[IdleNode, ...]:
    """The nodes that have been well for long enough, those first that came back least often.

    That is `wait` seconds, and twice as long after each time that a node was taken back and failed
    again. A node of another job waits at first only for others that join with it.
    """
    fit = [node for node in idle if not node.barred and node.well_for is not None]
    able = [node for node in fit if (node.well_for or 0.0) >= _needed(node, wait)]
    return tuple(sorted(able, key=lambda node: node.returns))


def _needed(node: IdleNode, wait: float) -> float:
    """Seconds for which a node must be well."""
    doubled = 2.0 ** min(node.returns, DOUBLINGS)
    return SETTLED + LOST * (doubled - 1) if node.joined else wait * doubled


def _seconds_of_use(node: IdleNode, left: float | None) -> float:
    """For how long a node would have ranks."""
    return max(0.0, min((end for end in (left, node.left) if end is not None), default=inf))


def _names_and_verb(nodes: Sequence[IdleNode]) -> str:
    """What has happened to nodes: `node2 is well again; node5, node6 have joined`."""
    said = []
    for joined, one, more in ((False, "is well again", "are well again"), (True, *_JOINED)):
        names = [node.name for node in nodes if node.joined is joined]
        if names:
            said.append(f"{', '.join(names)} {more if names[1:] else one}")
    return "; ".join(said)


_JOINED = "has joined", "have joined"


def times_lost(history: RunHistory) -> dict[str, int]:
    """How often each node of another job was lost."""
    lost = (event.nodes for event in history.events(NodesLeft) if event.lost)
    return dict(Counter(node for nodes in lost for node in nodes))


def times_taken_back(history: RunHistory) -> dict[str, int]:
    """How often each node was taken back."""
    found: dict[str, int] = {}
    for event in history.events(NodesTakenBack):
        for node in event.nodes:
            found[node] = found.get(node, 0) + 1
    return found


def last_growth(history: RunHistory, since: float) -> float | None:
    """When nodes were taken in last, in seconds since the epoch; None if none were `since` then."""
    times = [entry.time for entry in history.entries(NodesTakenBack, NodesJoined)]
    return max((time for time in times if time >= since), default=None)


def restart_seconds(history: RunHistory) -> float:
    """Seconds from the end of an attempt until the next one of the same supervisor has loaded its
    checkpoint, as the last restarts took them."""
    again = {entry.attempt for entry in history.entries(Restarting, NodesTakenBack)}
    again |= {entry.attempt for entry in history.entries(NodesJoined, NodesLeft)}
    kinds = history.entries(AttemptEnded, RankReady)
    took = [
        ready.time - ended.time
        for ended, ready in pairwise(kinds)
        if isinstance(ended.event, AttemptEnded)
        and isinstance(ready.event, RankReady)
        and ended.attempt in again
    ]
    return median(took[-REMEMBERED:]) if took else UNMEASURED_RESTART


def _not(reason: str) -> GrowDecision:
    return GrowDecision((), reason)
