"""What else a report tells: how long checkpoints took, which nodes failed, and what to change."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.insight.report.attempts import AttemptFacts
from kempner.insight.report.categories import Category
from kempner.insight.report.interruptions import Interruption
from kempner.insight.report.timeline import Timeline
from kempner.run.process.stop_reason import StopReason
from kempner.run.record.events.attempt import AttemptFailed, AttemptStarted
from kempner.run.record.events.checkpoint import CheckpointCommitted, CheckpointFailed
from kempner.run.record.events.health import MemoryLow, StragglerFound
from kempner.run.record.events.job import NodeSuspected
from kempner.run.record.events.stop import StopRequested
from kempner.run.record.save_times import nearest_rank, young_interval

MARGIN = 15.0
"""Seconds that a stop needs beyond saves and steps: docs/slurm.md, "How early to warn"."""

LEAST_HELD = 3600.0
"""Seconds of machines held before the failures among them say how often one is to be expected."""

_WARNED = (StopReason.TIME_LIMIT, StopReason.PREEMPTION, StopReason.DEADLINE, StopReason.REQUEUE)


@dataclass(frozen=True)
class Took:
    """Seconds from the call of a save to a durable checkpoint; None without a single one."""

    median: float | None
    p95: float | None
    worst: float | None


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run.

    `held_up_seconds` is how long one held up training, in the mean. `window_seconds` is the
    shortest time that was left when a stop with a deadline was asked for; `needed_seconds` what
    such a stop takes at worst: a save under way, the last one, two steps, and a margin.
    """

    committed: int
    failed: int
    took: Took
    largest_bytes: int
    interval_steps: int | None
    held_up_seconds: float | None
    window_seconds: float | None
    needed_seconds: float | None


@dataclass
class Node:
    """What happened on one node; `remarks` are sentences of the ledger, each once."""

    name: str
    failures: int = 0
    lost: int = 0
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Nodes:
    """How many nodes were used, and those of which there is something to tell, the worst first."""

    used: int
    noted: Sequence[Node]


@dataclass(frozen=True)
class Advice:
    """What to change, and from which measurements that follows."""

    what: str
    why: str


def saves_of(attempts: Sequence[AttemptFacts], timeline: Timeline) -> Saves:
    """How long checkpoints took, against the time that there is for the last one."""
    commits = [e.event for a in attempts for e in a.all(CheckpointCommitted)]
    took = [c.took.total for c in commits if c.took is not None and not c.suspended]
    steps = [b.step - a.step for a, b in pairwise(commits) if b.step > a.step]
    held_up = float(timeline.seconds()[Category.SAVE])
    left = [
        e.event.seconds_left
        for a in attempts
        for e in a.all(StopRequested)
        if StopReason.of_label(e.event.reason) in _WARNED
    ]
    unit = _unit(timeline)
    worst = max(took, default=None)
    needed = None if worst is None else math.ceil(2 * worst + 2 * (unit or 0.0) + MARGIN)
    return Saves(
        committed=len(commits),
        failed=sum(len(a.all(CheckpointFailed)) for a in attempts),
        took=Took(nearest_rank(took, 0.5), nearest_rank(took, 0.95), worst),
        largest_bytes=max((c.bytes for c in commits), default=0),
        interval_steps=round(statistics.median(steps)) if steps else None,
        held_up_seconds=held_up / len(commits) if commits and held_up else None,
        window_seconds=min(left, default=None),
        needed_seconds=needed,
    )


def _unit(timeline: Timeline) -> float | None:
    units = [a.unit for a in timeline.attempts if np.isfinite(a.unit)]
    return statistics.median(units) if units else None


def nodes_of(attempts: Sequence[AttemptFacts]) -> Nodes:
    """The nodes of all attempts."""
    used: set[str] = set()
    found: defaultdict[str, Node] = defaultdict(lambda: Node(""))
    for attempt in attempts:
        used |= _names(attempt.started.nodes)
        for entry in attempt.entries:
            match entry.event:
                case AttemptFailed(node=str(name), node_lost=lost) if name:
                    found[name].failures += 1
                    found[name].lost += lost
                case NodeSuspected(node=name, reason=reason):
                    _remark(found[name], reason)
                case StragglerFound(node=str(name), rank=rank, reason=reason):
                    _remark(found[name], f"rank {rank} {reason}")
                case MemoryLow(node=str(name), reason=reason):
                    _remark(found[name], reason)
    for name, node in found.items():
        node.name = name
    ordered = sorted(found.values(), key=lambda n: (-n.lost, -n.failures, -len(n.remarks), n.name))
    most = max((node_count(attempt.started) or 0 for attempt in attempts), default=0)
    return Nodes(max(most, len(used | set(found))), ordered)


def node_count(started: AttemptStarted) -> int | None:
    """How many nodes an attempt had; a supervisor outside of Slurm has only its own."""
    alone = started.job is None and started.launcher is None
    return len(_names(started.nodes)) or (1 if alone else None)


def _remark(node: Node, sentence: str) -> None:
    if sentence not in node.remarks:
        node.remarks.append(sentence)


def _names(nodes: str | None) -> set[str]:
    try:
        return set(expand_hosts(nodes)) if nodes else set()
    except ValueError:
        return set()


def advise(
    timeline: Timeline, saves: Saves, interruptions: Sequence[Interruption], nodes: Nodes
) -> list[Advice]:
    """What the measurements of this run suggest; nothing that was not measured."""
    seconds = timeline.seconds()
    held = sum(float(seconds[c]) for c in Category if c.holds_machines)
    failures = sum(i.kind.is_failure for i in interruptions)
    in_slurm = any(attempt.facts.started.job for attempt in timeline.attempts)
    found = [
        _interval(timeline, saves, failures, held),
        _window(saves) if in_slurm else None,
        _spare_nodes(timeline, nodes, held),
    ]
    return [advice for advice in found if advice is not None]


def _interval(timeline: Timeline, saves: Saves, failures: int, held: float) -> Advice | None:
    """Young's interval, with what saves cost and how often something failed."""
    unit = _unit(timeline)
    if not failures or not saves.held_up_seconds or not unit or not saves.took.median:
        return None
    if held < LEAST_HELD:
        return None
    between = held / failures
    young = young_interval(saves.held_up_seconds, between)
    best = max(young, saves.took.median)
    steps = max(1, round(best / unit))
    now = saves.interval_steps
    rough = "" if failures >= 5 else f" With {failures} in all this is a rough guide."
    return Advice(
        f"Save about every {steps:,} steps" + (f"; it was every {now:,}" if now else ""),
        f"A save holds training up for {saves.held_up_seconds:.2g} s and a failure comes every "
        f"{between / 3600:.2g} h: Young's formula gives {young:.3g} s. A save is durable after "
        f"{saves.took.median:.2g} s; a shorter interval gains nothing.{rough}",
    )


def _window(saves: Saves) -> Advice | None:
    """How early the job has to be warned of its end."""
    if saves.needed_seconds is None:
        return None
    window, needed = saves.window_seconds, saves.needed_seconds
    if window is not None and window < needed:
        what = f"Warn earlier: {needed:.0f} s before the end; once it was only {window:.0f} s"
    else:
        what = f"A warning {needed:.0f} s before the end of the job is enough"
    return Advice(
        f"{what} (--signal=B:SIGTERM@{needed:.0f})",
        f"The slowest checkpoint took {saves.took.worst:.2g} s. A stop needs two at most (one "
        f"under way and the last), two steps, and {MARGIN:.0f} s to leave and requeue.",
    )


def _spare_nodes(timeline: Timeline, nodes: Nodes, held: float) -> Advice | None:
    """How many spare nodes would have kept the job going."""
    lost = sum(node.lost for node in nodes.noted)
    if not lost:
        return None
    jobs = 1 + sum(bool((a.gap.category == Category.QUEUE).any()) for a in timeline.attempts)
    spare = max(1, math.ceil(lost / jobs))
    return Advice(
        f"Keep {spare} spare node{'s' if spare > 1 else ''} (supervise.spare_nodes)",
        f"{lost} node{'s were' if lost > 1 else ' was'} lost in {held / 3600:.2g} h over {jobs} "
        "launch(es) of the job; a spare one takes over without a new wait in the queue.",
    )
