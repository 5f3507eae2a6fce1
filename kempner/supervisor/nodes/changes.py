"""Pure functions: whether the ranks restart on more nodes, or on fewer.

Growing costs all nodes a restart, so the added nodes must repay it. A node that was taken back and
failed again is trusted later each time.

A node departs if Slurm shows that it drains or fails, or if its maintenance begins soon. A drain
whose reason begins with kempner's name does not count: a hook of the site set it because of
kempner's own report. Nodes are given back only once Slurm starts no other job on them: it takes a
node that has just died for healthy, and would give it to the next job at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, pairwise
from math import inf
from statistics import median

from kempner.cluster.slurm.scontrol import NodeShown, Reservation
from kempner.run.record.events import (
    AttemptEnded,
    NodesJoined,
    NodesLeft,
    NodesTakenBack,
    RankReady,
    Restarting,
)
from kempner.run.record.history import RunHistory
from kempner.supervisor.nodes.exclusion import node_flags

LARGEST_SHARE = 0.02
"""The largest share of a supervisor's time that growing may take, after the first time."""

PAYS = 3.0
"""Growing must gain this many times its cost, in the time that is left of the job."""

DOUBLINGS = 10
"""The most doublings of the seconds for which a node must be healthy; some days."""

UNMEASURED_RESTART = 60.0
"""Assumed seconds of a restart, until one was measured."""

SETTLED = 5.0
"""Seconds that a node of another job waits for others that join at the same time."""

LOST = 30.0
"""Seconds that it also waits after it was lost once; 90 after twice, and so on."""

REMEMBERED = 5
"""The number of last restarts whose median counts."""


@dataclass(frozen=True)
class IdleNode:
    """A node without ranks.

    `well_for` is the number of seconds for which it has answered that nothing is wrong with it,
    None if it does not answer so. `returns` counts how often it was taken back before. `barred`:
    its ranks failed there, or other runs suspect it, which no check refutes. A node that has
    `joined` from another job has `left` more seconds (None: not known), and its `returns` are the
    times that it was lost before."""

    name: str
    well_for: float | None
    returns: int = 0
    barred: bool = False
    joined: bool = False
    left: float | None = None


@dataclass(frozen=True)
class GrowSituation:
    """The ranks run on `used` nodes, and `missing` more are wanted.

    `training`: all ranks make steps, and neither a stop nor a failure is under way. In seconds:
    `since_growth` since the last growth (None: never), `restart_takes` for a restart, `left` until
    the ranks have to stop for the job's end (None: no end), `wait` is `supervise.grow_after`."""

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
    """The nodes to take in (empty: not now), and why."""

    nodes: tuple[str, ...]
    reason: str


def decide_growth(now: GrowSituation) -> GrowDecision:
    """Whether to stop the ranks and restart them on more nodes."""
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
    """The nodes that have been healthy for long enough, sorted by how often they came back.

    Long enough is `wait` seconds, doubled each time that a node was taken back and failed again. A
    node of another job at first waits only for others that join with it."""
    fit = [node for node in idle if not node.barred and node.well_for is not None]
    able = [node for node in fit if (node.well_for or 0.0) >= _needed(node, wait)]
    return tuple(sorted(able, key=lambda node: node.returns))


def _needed(node: IdleNode, wait: float) -> float:
    """Seconds for which a node must be healthy."""
    doubled = 2.0 ** min(node.returns, DOUBLINGS)
    return SETTLED + LOST * (doubled - 1) if node.joined else wait * doubled


def _seconds_of_use(node: IdleNode, left: float | None) -> float:
    """Seconds for which a node would have ranks."""
    return max(0.0, min((end for end in (left, node.left) if end is not None), default=inf))


def _names_and_verb(nodes: Sequence[IdleNode]) -> str:
    """Such as `node2 is well again; node5, node6 have joined`."""
    clauses = []
    for joined, one, more in ((False, "is well again", "are well again"), (True, *_JOINED)):
        names = [node.name for node in nodes if node.joined is joined]
        if names:
            clauses.append(f"{', '.join(names)} {more if names[1:] else one}")
    return "; ".join(clauses)


_JOINED = "has joined", "have joined"


def times_lost(history: RunHistory) -> dict[str, int]:
    lost = (event.nodes for event in history.events(NodesLeft) if event.lost)
    return dict(Counter(node for nodes in lost for node in nodes))


def times_taken_back(history: RunHistory) -> dict[str, int]:
    found: dict[str, int] = {}
    for event in history.events(NodesTakenBack):
        for node in event.nodes:
            found[node] = found.get(node, 0) + 1
    return found


def last_growth(history: RunHistory, since: float) -> float | None:
    """The time of the last growth in seconds since the epoch; None if there was none `since` a
    time."""
    times = [entry.time for entry in history.entries(NodesTakenBack, NodesJoined)]
    return max((time for time in times if time >= since), default=None)


def restart_seconds(history: RunHistory) -> float:
    """The median seconds of the last restarts, from the end of an attempt until the next one of the
    same supervisor has loaded its checkpoint."""
    again = {entry.attempt for entry in history.entries(Restarting, NodesTakenBack)}
    again |= {entry.attempt for entry in history.entries(NodesJoined, NodesLeft)}
    newest_first = reversed(history.entries(AttemptEnded, RankReady))
    took = (
        ready.time - ended.time
        for ready, ended in pairwise(newest_first)
        if isinstance(ended.event, AttemptEnded)
        and isinstance(ready.event, RankReady)
        and ended.attempt in again
    )
    return median(last) if (last := list(islice(took, REMEMBERED))) else UNMEASURED_RESTART


def _not(reason: str) -> GrowDecision:
    return GrowDecision((), reason)


SOON = 900.0
"""Seconds before a maintenance at which its nodes have to be left."""

_LEAVING = {
    "DRAIN": "drains",
    "DRAINING": "drains",
    "DRAINED": "drains",
    "FAIL": "is failing",
    "FAILING": "is failing",
    "REBOOT_REQUESTED": "is to be rebooted",
    "POWERING_DOWN": "powers down",
    "POWER_DOWN": "powers down",
}
_SILENT = frozenset(("DOWN", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN"))
_KEPT_FREE = _LEAVING.keys() | {"MAINT", "MAINTENANCE"}
_OUR_OWN = "kempner"
"""Prefix of the reason of a drain that follows from kempner's own report."""


def drained(shown: Iterable[NodeShown]) -> dict[str, str]:
    """The nodes that drain, fail, reboot or power down, each with the reason."""
    found = {}
    for node in shown:
        flags = node_flags(node.state)
        sign = next((phrase for flag, phrase in _LEAVING.items() if flag in flags), "")
        if sign and not node.reason.lower().startswith(_OUR_OWN):
            found[node.name] = f"it {sign}" + (f" ({node.reason})" if node.reason else "")
    return found


def in_maintenance(
    planned: Iterable[Reservation],
    nodes: Collection[str],
    now: float,
    end: float | None,
    own: str,
    hosts: Callable[[str], Sequence[str]],
) -> dict[str, str]:
    """Those of the `nodes` whose maintenance begins soon or has begun, each with a reason.

    `now` and the job's `end` (None without one) are in seconds since the epoch by the controller's
    clock; `own` is the reservation in which the job runs."""
    found: dict[str, str] = {}
    for one in planned:
        near = one.start <= now + SOON and (one.end is None or now < one.end)
        if (
            not (one.maintenance and near)
            or one.name == own
            or (end is not None and end < one.start)
        ):
            continue
        left = one.start - now
        when = f"begins in {left / 60:.0f} min" if left > 0 else "has begun"
        here = set(hosts(one.nodes)) & set(nodes) if one.nodes else set()
        found |= dict.fromkeys(here, f"its maintenance {one.name} {when}")
    return found


def may_give_back(left: Collection[str], shown: Iterable[NodeShown]) -> dict[str, str]:
    """Those of the `left` nodes that Slurm gives to no other job, each with the reason."""
    found = {}
    for node in shown:
        flags = node_flags(node.state)
        if node.name not in left or not flags & (_SILENT | _KEPT_FREE):
            continue
        silent = bool(flags & _SILENT)
        found[node.name] = "Slurm shows it as " + ("not responding" if silent else "leaving")
    return found


class DepartureAction(Enum):
    """What to do about nodes that depart."""

    NOTHING = "nothing"
    LEAVE_OUT = "nodes without ranks are left out, and given back"
    MOVE = "the ranks move to other nodes of the job"
    REQUEUE = "the job goes on elsewhere, by way of the queue"


@dataclass(frozen=True)
class DepartureSituation:
    """A job of which the nodes `going` depart, each with a reason.

    `nodes` are those of the launcher, `used` those with ranks, `host` that of the supervisor;
    `unavoidable` are departing nodes that would get ranks anyway. `commits`: the ranks commit when
    asked to stop; `comes_back`: the job can be requeued."""

    going: Mapping[str, str]
    nodes: Collection[str]
    used: Collection[str]
    host: str
    unavoidable: Collection[str]
    commits: bool
    comes_back: bool


@dataclass(frozen=True)
class DepartureDecision:
    """What to do, about which `nodes`, and why."""

    departure: DepartureAction
    nodes: tuple[str, ...]
    reason: str


def decide_departure(now: DepartureSituation) -> DepartureDecision:
    """What to do about nodes that depart: nothing if the run could not go on without them."""
    nodes = tuple(node for node in dict.fromkeys(now.nodes) if node in now.going)
    why = "; ".join(f"{node} is to go: {now.going[node]}" for node in nodes)
    if not nodes:
        return DepartureDecision(DepartureAction.NOTHING, (), "no node is to go")
    if now.host not in nodes and not set(nodes) & set(now.used):
        return DepartureDecision(DepartureAction.LEAVE_OUT, nodes, why)
    if not now.commits:
        reason = "the program would lose the steps since its last checkpoint, and stays"
        return DepartureDecision(DepartureAction.NOTHING, nodes, f"{why}; {reason}")
    if now.host not in nodes and not now.unavoidable:
        return DepartureDecision(DepartureAction.MOVE, nodes, why)
    if not now.comes_back:
        reason = "no other node can take its place, and the job cannot be requeued: it stays"
        return DepartureDecision(DepartureAction.NOTHING, nodes, f"{why}; {reason}")
    return DepartureDecision(DepartureAction.REQUEUE, nodes, why)
