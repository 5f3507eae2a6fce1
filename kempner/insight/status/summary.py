"""The status of a run, from its facts: what its ranks do, which one is slow or awaited by the
others, its progress and speed by the last lines of its metrics, and what comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, TypeGuard

from kempner.insight.attempts import AttemptFacts, InterruptionKind, cause_of
from kempner.insight.report.page.words import duration
from kempner.insight.run_reader import CheckpointFacts, RankPlace, RunFacts
from kempner.insight.status.activity import Activity, ActivityNote, decide
from kempner.insight.status.job import JobStatus
from kempner.run.control.protocol import Phase
from kempner.run.output.units import name_or_count, name_ranks
from kempner.run.record.events import (
    CheckpointCommitted,
    RankReady,
    Recovered,
    StopRequested,
    StragglerFound,
)
from kempner.run.record.save_times import nearest_rank

STANDS_OUT = 0.05
"""How far a rank's share of time at work must exceed the others' to be called slow."""

ENOUGH = 10.0  # seconds of work below which no rank is compared with another


@dataclass(frozen=True)
class RankGroup:
    """Ranks, in ascending order, with the same step, phase and storage problem."""

    ranks: tuple[int, ...]
    step: int
    phase: str
    storage: str = ""

    @property
    def name(self) -> str:
        """`rank 3`, or `ranks 0-6, 9`."""
        return name_ranks(self.ranks)

    @property
    def place(self) -> str:
        waits = f", waiting for storage: {self.storage}" if self.storage else ""
        return f"step {self.step}, {self.phase}{waits}"


@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for; `node` if known."""

    rank: int
    node: str | None
    sentence: str


def gather(places: Iterable[RankPlace]) -> tuple[RankGroup, ...]:
    """Group ranks in the same place, so that thousands fit on a screen."""
    together: dict[tuple[int, str, str], list[int]] = {}
    for rank in places:
        together.setdefault((rank.step, rank.phase, rank.storage), []).append(rank.rank)
    return tuple(
        RankGroup(tuple(sorted(members)), *place) for place, members in sorted(together.items())
    )


def slowest(places: Sequence[RankPlace], attempt: AttemptFacts | None) -> SlowRank | None:
    """The slowest rank, if one stands out: the supervisor's straggler, or by the share of time that
    each rank of the attempt has worked rather than waited for others."""
    if attempt is not None and (found := _straggler(attempt)) is not None:
        return SlowRank(found.rank, found.node, found.reason)
    shares = {p.rank: p.worked / (p.worked + p.waited) for p in places if p.worked >= ENOUGH}
    if len(shares) < 2:
        return None
    rank = max(shares, key=lambda number: (shares[number], -number))
    usual = median(share for number, share in shares.items() if number != rank)
    if shares[rank] - usual < STANDS_OUT:
        return None
    sentence = f"rank {rank} works {shares[rank]:.0%} of the time, the others {usual:.0%}"
    return SlowRank(rank, None, sentence)


def _straggler(attempt: AttemptFacts) -> StragglerFound | None:
    """The last straggler that the supervisor found, unless it has recovered."""
    found = None
    for entry in attempt.entries:
        match entry.event:
            case StragglerFound():
                found = entry.event
            case Recovered(of=StragglerFound.name):
                found = None
    return found


def describe_waiting(places: Sequence[RankPlace]) -> str:
    """What most ranks wait in, and for which ranks, during a standstill; empty if none waits."""
    waiting = Counter(place.waiting for place in places if place.waiting)
    if not waiting:
        return ""
    ((what, many),) = waiting.most_common(1)
    sentence = f"{many:,} of {len(places):,} ranks wait in {what}"
    front = max(place.step for place in places)
    others = [p for p in places if p.waiting != what or p.step < front]
    if not others or len(others) == len(places):
        return sentence
    behind = sorted(place.rank for place in others)
    first = min(others, key=lambda place: (place.step, place.rank))
    return f"{sentence} for {name_or_count(behind)} (step {first.step}, {first.phase})"


RECENT = 50  # logged steps over which speed is averaged


@dataclass(frozen=True)
class StepPace:
    """The speed of the last attempt's last steps; None where unknown. `mfu` is the model FLOPs
    utilization (0 to 1) and `logged_every` the seconds between two logged steps, both medians; the
    others are means. `seconds_left` counts to the last step. `waited` has the shares (0 to 1) of
    time that rank 0 waited for `data`, `others` and `saves`."""

    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    logged_every: float | None = None
    waited: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunProgress:
    """The last logged step, the total number, and the loss; None where unknown. `logged_at` is in
    seconds since the epoch; losses are in nats per token. `accuracy` is that of preferences, whose
    losses are per pair. `eval_sets` has the values of each set of `eval.sets`."""

    step: int | None = None
    total: int | None = None
    logged_at: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    eval_loss: float | None = None
    eval_sets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    pace: StepPace = StepPace()


def measure(lines: Iterable[Mapping[str, Any]], total: int | None) -> RunProgress:
    """The progress by lines of metrics; `total` is the number of steps of the whole run. Skips
    lines that are not kempner's."""
    own_lines = [line for line in lines if _is_number(line.get("step"))]
    steps = [line for line in own_lines if "loss" in line]
    held_out = [line["eval_loss"] for line in own_lines if _is_number(line.get("eval_loss"))]
    evaluated = RunProgress(
        total=total,
        eval_loss=held_out[-1] if held_out else None,
        eval_sets=_last_sets(own_lines),
    )
    if not steps:
        return evaluated
    last = steps[-1]
    recent = [line for line in steps[-RECENT:] if line.get("attempt") == last.get("attempt")]
    first = recent[0]
    seconds, tokens, made = (_grown(first, last, key) for key in ("time", "tokens", "step"))
    used, times = curve(recent, "mfu"), curve(recent, "time")
    each = seconds / made if seconds and made else None
    left = None if total is None or each is None else max(0, total - last["step"]) * each
    pace = StepPace(
        tokens_per_second=tokens / seconds if tokens and seconds and made else None,
        mfu=median(used) if used else None,
        seconds_per_step=each,
        seconds_left=left,
        logged_every=median(b - a for a, b in pairwise(times)) if times[1:] else None,
        waited=_waited(recent[1:], seconds) if seconds else {},
    )
    return replace(
        evaluated,
        step=int(last["step"]),
        logged_at=last["time"] if _is_number(last.get("time")) else None,
        loss=last["loss"] if _is_number(last["loss"]) else None,
        accuracy=last["accuracy"] if _is_number(last.get("accuracy")) else None,
        pace=pace,
    )


def _last_sets(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The numbers of each set of eval.sets in the last evaluation that had sets."""
    found: Any = next((one["eval_sets"] for one in reversed(lines) if "eval_sets" in one), {})
    sets = found.items() if isinstance(found, dict) else ()
    return {
        name: {key: value for key, value in numbers.items() if _is_number(value)}
        for name, numbers in sets
        if isinstance(numbers, dict)
    }


def curve(lines: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [line[key] for line in lines if _is_number(line.get(key)) and "loss" in line]


_WAITS = {"data": "data_seconds", "others": "wait_seconds", "saves": "save_seconds"}


def _waited(lines: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """The times that rank 0 waited, as shares of the `seconds` that the lines cover."""
    found = {}
    for name, key in _WAITS.items():
        times = [line[key] for line in lines if _is_number(line.get(key))]
        if times:
            found[name] = round(min(1.0, sum(times) / seconds), 4)
    return found


def _grown(first: Mapping[str, Any], last: Mapping[str, Any], key: str) -> float | None:
    before, after = first.get(key), last.get(key)
    if not (_is_number(before) and _is_number(after)):
        return None
    return after - before if after > before else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


SHOWN_ENDS = 5  # how many of the last interruptions are shown

STILL_AFTER, STILL_FACTOR = 10.0, 5.0
"""Waiting ranks are shown after these seconds, and this multiple of the usual time, without a
step."""


@dataclass(frozen=True)
class EndOfAttempt:
    """The end of an attempt before the run's last step, at `time` (Unix seconds). `rank` failed
    first, on `node`, if one did."""

    attempt: int
    time: float
    kind: InterruptionKind
    cause: str
    rank: int | None
    node: str


@dataclass(frozen=True)
class AttemptStatus:
    """The last attempt; `begin` is in seconds since the epoch."""

    number: int
    begin: float
    ranks: int
    nodes: str
    device: str


@dataclass(frozen=True)
class UpcomingEvent:
    """`time` is in Unix seconds."""

    time: float
    what: str


@dataclass(frozen=True)
class Outlook:
    """What comes next: `done_at` (Unix seconds) is when the run completes at its current speed,
    `fits` whether that is before the job's end, `deadline` the next deadline."""

    done_at: float | None
    fits: bool | None
    deadline: UpcomingEvent | None


@dataclass(frozen=True)
class RankStatus:
    """The ranks in groups, the slowest one if one stands out, and what they wait for; empty if they
    do not."""

    groups: tuple[RankGroup, ...]
    slowest: SlowRank | None
    waits_for: str


@dataclass(frozen=True)
class Status:
    """The status of a run. `ends` are the last interruptions, oldest first."""

    facts: RunFacts
    doing: ActivityNote
    progress: RunProgress
    attempt: AttemptStatus | None
    ends: tuple[EndOfAttempt, ...]
    outlook: Outlook
    ranks: RankStatus

    @property
    def now(self) -> float:
        return self.facts.now

    @property
    def job(self) -> JobStatus | None:
        return self.facts.job

    @property
    def state(self) -> str:
        reason = self.doing.reason
        return f"{self.doing.activity}{f' ({reason})' if reason else ''}"

    def curve(self, key: str) -> list[float]:
        return curve(self.facts.metrics.lines, key)

    def later(self, seconds: float, *wrong: str) -> Status:
        """The status `seconds` later, with sentences on what could not be read since (`wrong`)."""
        unread = (*self.facts.unread, *wrong)
        return replace(self, facts=replace(self.facts, now=self.now + seconds, unread=unread))

    def to_json(self) -> dict[str, Any]:
        """The output of `--json`; docs/status.md lists the keys."""
        facts, progress, outlook = self.facts, self.progress, self.outlook
        found, pace = facts.checkpoint, progress.pace
        return {
            "time": round(self.now, 3),
            "state": self.doing.activity.value,
            "reason": self.doing.reason,
            "alive": facts.live.alive,
            "step": progress.step,
            "total_steps": progress.total,
            "loss": progress.loss,
            "accuracy": progress.accuracy,
            "eval_loss": progress.eval_loss,
            "eval_sets": {name: dict(found) for name, found in progress.eval_sets.items()},
            "tokens_per_second": pace.tokens_per_second,
            "mfu": pace.mfu,
            "seconds_per_step": pace.seconds_per_step,
            "seconds_left": pace.seconds_left,
            "waited": dict(pace.waited),
            "done_at": outlook.done_at,
            "done_before_job_ends": outlook.fits,
            "attempt": None if self.attempt is None else vars(self.attempt),
            "interruptions": [vars(end) for end in self.ends],
            "checkpoint": None if found is None else _checkpoint(found),
            "deadline": None if outlook.deadline is None else vars(outlook.deadline),
            "waits_for": self.ranks.waits_for,
            "slowest": None if self.ranks.slowest is None else vars(self.ranks.slowest),
            "ranks": [_group(group) for group in self.ranks.groups],
            "job": None if self.job is None else _job(self.job),
            "gave_up": None if facts.gave_up is None else facts.gave_up.fields(),
            "unread": list(facts.unread),
        }


def _checkpoint(found: CheckpointFacts) -> dict[str, Any]:
    plain = {"step": found.step, "time": found.time, "verified_at": found.verified_at}
    return {**plain, "damaged_files": found.damaged, "loaded": found.loaded}


def _group(group: RankGroup) -> dict[str, Any]:
    place = {"step": group.step, "phase": group.phase, "storage": group.storage}
    return {"ranks": group.name.partition(" ")[2], "count": len(group.ranks), **place}


def _job(job: JobStatus) -> dict[str, Any]:
    times = {"begins_at": job.begins_at, "ends_at": job.ends_at, "preempted": job.preempted}
    plain = {"id": job.job, "state": job.state, "reason": job.reason, "nodes": job.nodes}
    return {**plain, **times, "restarts": vars(job.restarts), "restarts_agree": job.agrees}


def summarise(facts: RunFacts) -> Status:
    attempts = facts.attempts
    last = attempts[-1] if attempts else None
    progress = measure(facts.metrics.lines, facts.metrics.total_steps)
    if progress.step is None:  # a program without metrics may report its step
        known_steps = [p.step for p in facts.live.ranks] + [a.known_step for a in attempts]
        progress = replace(progress, step=max(known_steps, default=0) or None)
    doing = decide(facts)
    still = _stands_still(facts, progress, last) if doing.activity in _BETWEEN_STEPS else ""
    if still:
        doing = ActivityNote(doing.activity, f"{doing.reason}: {still}" if doing.reason else still)
    live = doing.activity.is_live and facts.live.alive is not False
    return Status(
        facts=facts,
        doing=doing,
        progress=progress,
        attempt=None if last is None else _attempt(last),
        ends=_ends(attempts, live),
        outlook=_outlook(facts, doing.activity, progress, last, bool(still)),
        ranks=RankStatus(
            gather(facts.live.ranks if live else ()),
            slowest(facts.live.ranks, last) if live else None,
            _waits_for(facts, doing.activity, still),
        ),
    )


def _attempt(last: AttemptFacts) -> AttemptStatus:
    ready = last.first(RankReady)
    return AttemptStatus(
        last.number,
        last.begin,
        last.started.ranks,
        last.started.nodes or "",
        "" if ready is None else ready.event.device,
    )


def _ends(attempts: Sequence[AttemptFacts], live: bool) -> tuple[EndOfAttempt, ...]:
    """The ends of attempts, except a last one that still runs."""
    found = []
    for attempt in attempts:
        unfinished = attempt is attempts[-1] and not attempt.over and (live or not attempt.stopped)
        if attempt.completed or unfinished:
            continue
        kind, cause, _, rank, node = cause_of(attempt)
        found.append(EndOfAttempt(attempt.number, attempt.end, kind, cause, rank, node))
    return tuple(found[-SHOWN_ENDS:])


def _outlook(
    facts: RunFacts,
    activity: Activity,
    progress: RunProgress,
    last: AttemptFacts | None,
    still: bool,
) -> Outlook:
    done_at = None
    if activity in _MOVING and not still and progress.pace.seconds_left is not None:
        since = progress.logged_at or facts.now
        done_at = max(facts.now, since + progress.pace.seconds_left)
    ends_at = None if facts.job is None else facts.job.ends_at
    fits = None if done_at is None or ends_at is None else done_at <= ends_at
    return Outlook(done_at, fits, _deadline(facts, activity, last))


_MOVING = (Activity.TRAINING, Activity.SAVING, Activity.EVALUATING)
_BETWEEN_STEPS = (Activity.TRAINING, Activity.SAVING)
"""Activities that should soon lead to the next step; an evaluation may take any time."""


def _deadline(
    facts: RunFacts, activity: Activity, last: AttemptFacts | None
) -> UpcomingEvent | None:
    """The next event that does not depend on the ranks."""
    found = []
    if activity is Activity.STOPPING and last is not None and not last.over:
        asked = [e.time + e.event.seconds_left for e in last.all(StopRequested)]
        found += [UpcomingEvent(time, "ranks that are still there are killed") for time in asked]
    job = facts.job
    if job is not None and job.ends_at is not None:
        what = "the preemption takes the nodes" if job.preempted else "the job's time is over"
        found.append(UpcomingEvent(job.ends_at, what))
    if job is not None and job.begins_at is not None:
        found.append(UpcomingEvent(job.begins_at, "Slurm expects to start the job"))
    return min(found, key=lambda deadline: deadline.time, default=None)


def _waits_for(facts: RunFacts, activity: Activity, still: str) -> str:
    """What the run waits for; empty if it does not."""
    match activity:
        case Activity.QUEUED:
            return "" if facts.job is None else facts.job.why_waiting
        case Activity.WAITING_FOR_STORAGE:
            return next(place.storage for place in facts.live.ranks if place.storage)
        case Activity.TRAINING:
            return describe_waiting(facts.live.ranks) if still else ""
        case Activity.SAVING:
            return _slow_storage(facts) if still else ""
        case Activity.STARTING | Activity.LOADING | Activity.STOPPING:
            return _last_ones(facts.live.ranks) if facts.live.alive else ""
    return ""


def _stands_still(facts: RunFacts, progress: RunProgress, last: AttemptFacts | None) -> str:
    """How long no step was logged, in a sentence; empty if that is normal."""
    ready = 0.0 if last is None or last.ready_at is None else last.ready_at
    since = max(ready, progress.logged_at or 0.0)
    usual = progress.pace.logged_every
    patience = max(STILL_AFTER, STILL_FACTOR * (usual or 0.0))
    if not since or facts.now - since <= patience or usual is None:
        return ""
    return f"no step for {duration(facts.now - since)}, usually one every {duration(usual)}"


def _slow_storage(facts: RunFacts) -> str:
    took = [c.took.total for c in facts.history.events(CheckpointCommitted) if c.took is not None]
    usual = nearest_rank(took, 0.5)
    remark = "" if usual is None else f"; a save usually takes {duration(usual)}"
    return f"storage: the files of a checkpoint are still being written{remark}"


def _last_ones(places: Sequence[RankPlace]) -> str:
    """The ranks that are behind the others while starting or stopping; empty if none is."""
    order = {phase.value: number for number, phase in enumerate(Phase)}
    groups = sorted(gather(places), key=lambda group: (order.get(group.phase, 0), group.step))
    if len(groups) < 2 or len(groups[0].ranks) > len(places) // 2:
        return ""
    return f"{name_or_count(groups[0].ranks)} ({groups[0].place})"
