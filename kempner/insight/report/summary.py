"""The report of one run, as data for the page and `--json`: interruptions and their cost, save
times, node failures, and advice."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.insight.attempts import AttemptFacts, InterruptionKind, attempts_of, cause_of
from kempner.insight.report.series import Evaluations, StepSeries, read_series
from kempner.insight.report.timeline import AttemptTime, Category, Pieces, Timeline, account
from kempner.insight.run_reader import RunReader
from kempner.run.process.exit_codes import DataError, StopReason, UsageError
from kempner.run.record.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointFailed,
    Completed,
    MemoryLow,
    NodeSuspected,
    RankReady,
    Stopped,
    StopRequested,
    StragglerFound,
)
from kempner.run.record.run_dir import RunDirectory
from kempner.run.record.save_times import nearest_rank, young_interval

MARGIN = 15.0
"""Seconds that a stop needs besides saves and steps: docs/slurm.md, "How early to warn"."""

LEAST_HELD = 3600.0
"""Seconds that machines must be held before a failure rate is computed."""

_WARNED = (StopReason.TIME_LIMIT, StopReason.PREEMPTION, StopReason.DEADLINE, StopReason.REQUEUE)


HOUR = 3600.0


@dataclass(frozen=True)
class InterruptionPlace:
    """Where a run was interrupted. `rank` failed first, on `node`, if one did. `step` is the last
    completed one; `steps_lost` had to be repeated, None if unknown: the program does not report, or
    the run has not resumed yet."""

    rank: int | None
    node: str
    step: int
    steps_lost: int | None


@dataclass(frozen=True)
class Cost:
    """The cost of an interruption, in seconds of wall time and in GPU hours on all ranks.

    It is the end of the attempt (`hung_seconds`, `stop_seconds`), the start of the next one
    (`restart_seconds`), and the steps that were cut off or repeated (`made_again_seconds`). During
    `away_seconds` (queued, or not started) no machine was held.

    `hung_seconds` count from the last step. They end with `still_seconds`, in which the supervisor
    saw no progress, and those with `evidence_seconds`, in which it collected evidence of the hang;
    None if unknown.
    """

    hung_seconds: float
    still_seconds: float | None
    evidence_seconds: float | None
    stop_seconds: float
    restart_seconds: float
    made_again_seconds: float
    away_seconds: float
    gpu_hours: float


@dataclass(frozen=True)
class Interruption:
    """One end of an attempt before the run's last step. `time` is in seconds since the epoch."""

    number: int
    time: float
    attempt: int
    kind: InterruptionKind
    cause: str
    detail: str
    place: InterruptionPlace
    cost: Cost


def interruptions_of(timeline: Timeline, dead: bool = False) -> list[Interruption]:
    """The interruptions of a run, in order; if it is `dead`, its last attempt has ended, too."""
    found: list[Interruption] = []
    front = 0
    for place, time in enumerate(timeline.attempts):
        front = max(front, time.reached)
        later = timeline.attempts[place + 1 :]
        unfinished = not (later or time.facts.over or dead)
        if not (time.facts.completed or unfinished):
            found.append(_interruption(len(found) + 1, time, later, front))
    return found


def _interruption(
    number: int, time: AttemptTime, later: Sequence[AttemptTime], front: int
) -> Interruption:
    following = later[0] if later else None
    facts, ready = time.facts, time.facts.ready_at is not None
    # The next attempt that reached a step repeats what was lost.
    later_ready = [each for each in later if each.facts.ready_at is not None]
    resumed = later_ready[0] if later_ready and ready else None
    kind, cause, detail, rank, node = cause_of(facts)
    place = InterruptionPlace(
        rank=rank,
        node=node,
        step=time.reached if ready else max(front, facts.known_step),
        steps_lost=_steps_lost(time, resumed),
    )
    ending = time.tail.begin[time.tail.category == Category.STOP]
    over = float(ending[0]) if len(ending) else facts.end  # it failed, or a hang was found
    if kind is InterruptionKind.STOP:
        over = float(time.tail.end[-1])
    cost = _cost(time, following, resumed)
    return Interruption(number, over, facts.number, kind, cause, detail, place, cost)


def _steps_lost(time: AttemptTime, resumed: AttemptTime | None) -> int | None:
    if time.facts.ready_at is None:  # no step to lose, if it reports steps at all
        return None if time.facts.reports_nothing else 0
    again = None if resumed is None else resumed.facts.first_step
    if again is not None:
        return max(0, time.reached - again)
    stopped = time.facts.last(Stopped)
    return None if stopped is None else stopped.event.lost_steps


def _cost(time: AttemptTime, following: AttemptTime | None, resumed: AttemptTime | None) -> Cost:
    ours, theirs = _seconds(time.tail, time.gap), _after(following)
    recomputed = 0.0 if resumed is None else _seconds(resumed.body)[Category.RECOMPUTED]
    ranks = time.facts.started.ranks
    ranks_then = ranks if following is None else following.facts.started.ranks
    ending = (Category.HUNG, Category.STOP, Category.START, Category.RECOMPUTED)
    found = time.facts.hang()
    hang = None if found is None else found.event
    here = sum(ours[c] for c in ending)
    there = theirs[Category.START] + theirs[Category.LOAD] + recomputed
    return Cost(
        hung_seconds=ours[Category.HUNG],
        still_seconds=None if hang is None else hang.seconds,
        evidence_seconds=None if hang is None else hang.evidence_seconds,
        stop_seconds=ours[Category.STOP],
        restart_seconds=ours[Category.START] + theirs[Category.START] + theirs[Category.LOAD],
        made_again_seconds=ours[Category.RECOMPUTED] + recomputed,
        away_seconds=ours[Category.QUEUE] + ours[Category.IDLE],
        gpu_hours=(here * ranks + there * ranks_then) / HOUR,
    )


def _seconds(*pieces: Pieces) -> list[float]:
    return [float(x) for x in sum(p.seconds() for p in pieces)]  # type: ignore[union-attr]


def _after(following: AttemptTime | None) -> list[float]:
    """Seconds of the next attempt that count as a cost of the interruption before it."""
    if following is None:
        return [0.0] * len(Category)
    seconds = _seconds(following.body)
    if following.facts.ready_at is None:
        seconds[Category.START] += _seconds(following.tail)[Category.START]
    return seconds


@dataclass(frozen=True)
class SaveDuration:
    """Seconds from the call of a save to a durable checkpoint; None without saves."""

    median: float | None
    p95: float | None
    worst: float | None


@dataclass(frozen=True)
class SaveStatistics:
    """The checkpoints of a run. `held_up_seconds` is the mean time that a save held up training,
    `window_seconds` the shortest time that a stop with a deadline had, `needed_seconds` the longest
    that such a stop takes: a save under way, the last one, two steps, and a margin."""

    committed: int
    failed: int
    took: SaveDuration
    largest_bytes: int
    interval_steps: int | None
    held_up_seconds: float | None
    window_seconds: float | None
    needed_seconds: float | None


@dataclass
class Node:
    """The events of one node; `remarks` are sentences of the ledger, without duplicates."""

    name: str
    failures: int = 0
    lost: int = 0
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class NodeUse:
    """The number of nodes used, and those with failures or remarks, the worst first."""

    used: int
    noted: Sequence[Node]


@dataclass(frozen=True)
class Advice:
    what: str
    why: str


def saves_of(attempts: Sequence[AttemptFacts], timeline: Timeline) -> SaveStatistics:
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
    return SaveStatistics(
        committed=len(commits),
        failed=sum(len(a.all(CheckpointFailed)) for a in attempts),
        took=SaveDuration(nearest_rank(took, 0.5), nearest_rank(took, 0.95), worst),
        largest_bytes=max((c.bytes for c in commits), default=0),
        interval_steps=round(statistics.median(steps)) if steps else None,
        held_up_seconds=held_up / len(commits) if commits and held_up else None,
        window_seconds=min(left, default=None),
        needed_seconds=needed,
    )


def _unit(timeline: Timeline) -> float | None:
    units = [a.unit for a in timeline.attempts if np.isfinite(a.unit)]
    return statistics.median(units) if units else None


def nodes_of(attempts: Sequence[AttemptFacts]) -> NodeUse:
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
    return NodeUse(max(most, len(used | set(found))), ordered)


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
    timeline: Timeline, saves: SaveStatistics, interruptions: Sequence[Interruption], nodes: NodeUse
) -> list[Advice]:
    """Advice from the measurements of this run alone."""
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


def _interval(
    timeline: Timeline, saves: SaveStatistics, failures: int, held: float
) -> Advice | None:
    unit = _unit(timeline)
    if not failures or not saves.held_up_seconds or not unit or not saves.took.median:
        return None
    if held < LEAST_HELD:
        return None
    between = held / failures
    young, now = young_interval(saves.held_up_seconds, between), saves.interval_steps
    steps = max(1, round(max(young, saves.took.median) / unit))
    rough = "" if failures >= 5 else f" With {failures} in all this is a rough guide."
    return Advice(
        f"Save about every {steps:,} steps" + (f"; it was every {now:,}" if now else ""),
        f"A save holds training up for {saves.held_up_seconds:.2g} s and a failure comes every "
        f"{between / 3600:.2g} h: Young's formula gives {young:.3g} s. A save is durable after "
        f"{saves.took.median:.2g} s; a shorter interval gains nothing.{rough}",
    )


def _window(saves: SaveStatistics) -> Advice | None:
    if saves.needed_seconds is None:
        return None
    window, needed = saves.window_seconds, saves.needed_seconds
    what = f"A warning {needed:.0f} s before the end of the job is enough"
    if window is not None and window < needed:
        what = f"Warn earlier: {needed:.0f} s before the end; once it was only {window:.0f} s"
    return Advice(
        f"{what} (--signal=B:SIGTERM@{needed:.0f})",
        f"The slowest checkpoint took {saves.took.worst:.2g} s. A stop needs two at most (one "
        f"under way and the last), two steps, and {MARGIN:.0f} s to leave and requeue.",
    )


def _spare_nodes(timeline: Timeline, nodes: NodeUse, held: float) -> Advice | None:
    if not (lost := sum(node.lost for node in nodes.noted)):
        return None
    jobs = 1 + sum(bool((a.gap.category == Category.QUEUE).any()) for a in timeline.attempts)
    spare = max(1, math.ceil(lost / jobs))
    return Advice(
        f"Keep {spare} spare node{'s' if spare > 1 else ''} (supervise.spare_nodes)",
        f"{lost} node{'s were' if lost > 1 else ' was'} lost in {held / 3600:.2g} h over {jobs} "
        "launch(es) of the job; a spare one takes over without a new wait in the queue.",
    )


_UNSEEN = "in progress, or ended without a message"
"""The state if it is unknown whether a supervisor is alive."""


@dataclass(frozen=True)
class TrainingSummary:
    """A run's progress and state; None where unknown."""

    state: str
    step: int
    total_steps: int | None
    attempts: int
    last_loss: float | None
    last_eval_loss: float | None
    last_eval_losses: Mapping[str, float]
    """By the names of eval.sets."""
    tokens_per_second: float | None


@dataclass(frozen=True)
class Machines:
    """The most ranks and nodes of an attempt; `nodes` is None if the ledger does not say."""

    ranks: int
    nodes: int | None
    device: str

    @property
    def counted(self) -> str:
        """What time is counted for: GPUs, or ranks without one."""
        return "rank" if self.device.startswith("cpu") else "GPU"


@dataclass(frozen=True)
class TimeSpent:
    """Where the time went. `begin` and `end` are seconds since the epoch; `seconds` and `gpu_hours`
    are by category, and a rank counts as one GPU. `goodput` is the effective training time ratio:
    training time by wall time. `while_held` is training time by the time in which the job held its
    machines."""

    begin: float
    end: float
    machines: Machines
    goodput: float | None
    while_held: float | None
    seconds: Mapping[str, float]
    gpu_hours: Mapping[str, float]

    @property
    def wall(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class RunReport:
    name: str
    training: TrainingSummary
    time: TimeSpent
    interruptions: Sequence[Interruption]
    saves: SaveStatistics
    nodes: NodeUse
    advice: Sequence[Advice]

    @property
    def lost_hours(self) -> float:
        return sum(one.cost.gpu_hours for one in self.interruptions)

    def to_json(self) -> dict[str, Any]:
        sums = {"wall_seconds": self.time.wall, "lost_gpu_hours": self.lost_hours}
        return {**asdict(self), **sums}


@dataclass(frozen=True)
class RunData:
    """A run's report, and the data of its plots."""

    report: RunReport
    timeline: Timeline
    attempts: Sequence[AttemptFacts]
    steps: StepSeries
    evaluations: Evaluations


def read_run(run: RunDirectory) -> RunData:
    """Read a run and account for its time.

    Raises `UsageError` if there is none, `DataError` if one of its files cannot be read now.
    """
    if not run.ledger.is_file():
        raise UsageError(
            f"{run.path} is not a run: it has no ledger.jsonl; name <run.dir>/<run.name>"
        )
    try:
        facts = RunReader(run, patient=True, whole=True).read()
        steps, evaluations = read_series(run.metrics)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}; try again") from error
    attempts = attempts_of(facts.history, steps.last_times())
    if not attempts:
        raise UsageError(f"{run.path} has not been started yet: its ledger tells of no attempt")
    timeline = account(attempts, steps)
    name, alive, total = run.path.resolve().name, facts.live.alive, facts.metrics.total_steps
    report = summarise(name, attempts, timeline, steps, evaluations, total, alive)
    return RunData(report, timeline, attempts, steps, evaluations)


def summarise(
    name: str,
    attempts: Sequence[AttemptFacts],
    timeline: Timeline,
    steps: StepSeries,
    evaluations: Evaluations,
    total: int | None,
    alive: bool | None = None,
) -> RunReport:
    """The report of a run with at least one attempt; `alive`: its supervisor is alive."""
    interruptions = interruptions_of(timeline, dead=alive is False)
    saves = saves_of(attempts, timeline)
    nodes = nodes_of(attempts)
    training = TrainingSummary(
        state=_state(attempts[-1], interruptions, alive),
        step=max(time.reached for time in timeline.attempts),
        total_steps=total,
        attempts=len(attempts),
        last_loss=_last(steps.loss),
        last_eval_loss=_last(evaluations[""].loss),
        last_eval_losses={n: float(one.loss[-1]) for n, one in evaluations.items() if n},
        tokens_per_second=_last(steps.tokens_per_second[-50:], middle=True),
    )
    time, advice = _time_spent(attempts, timeline), advise(timeline, saves, interruptions, nodes)
    return RunReport(name, training, time, interruptions, saves, nodes, advice)


def _time_spent(attempts: Sequence[AttemptFacts], timeline: Timeline) -> TimeSpent:
    seconds = timeline.seconds()
    wall, train = timeline.end - timeline.begin, float(seconds[Category.TRAIN])
    held = sum(float(seconds[c]) for c in Category if c.holds_machines)
    steps_reported = not timeline.reports_nothing
    ready = [e.event.device for a in attempts for e in a.all(RankReady)]
    machines = Machines(
        ranks=max(a.started.ranks for a in attempts),
        nodes=max((many for a in attempts if (many := node_count(a.started))), default=None),
        device=ready[-1] if ready else "",
    )
    return TimeSpent(
        begin=timeline.begin,
        end=timeline.end,
        machines=machines,
        goodput=train / wall if steps_reported and wall else None,
        while_held=train / held if steps_reported and held else None,
        seconds={c.key: float(seconds[c]) for c in Category},
        gpu_hours=_gpu_hours(timeline),
    )


def _gpu_hours(timeline: Timeline) -> dict[str, float]:
    """GPU hours by category, over all ranks; 0 while no machine is held."""
    total = dict.fromkeys((c.key for c in Category), 0.0)
    for time in timeline.attempts:
        ranks = time.facts.started.ranks
        for pieces in (time.body, time.tail, time.gap):
            for category, seconds in zip(Category, pieces.seconds(), strict=True):
                total[category.key] += float(seconds) * ranks / HOUR * category.holds_machines
    return total


def _state(last: AttemptFacts, interruptions: Sequence[Interruption], alive: bool | None) -> str:
    if last.completed:
        return Completed.name
    if last.given_up is not None:
        return "given up"
    if last.left_at is not None:
        return f"ended after step {last.left_at}, not complete"
    if alive:
        return "in progress"
    if not last.over:
        return "ended without a message" if alive is False else _UNSEEN
    end = interruptions[-1] if interruptions else None
    return end.cause if end is not None and end.kind is InterruptionKind.STOP else "interrupted"


def _last(values: Any, middle: bool = False) -> float | None:
    known = values[values == values]
    if not len(known):
        return None
    return float(sorted(known)[len(known) // 2] if middle else known[-1])
