"""The status of a run: what its facts come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kempner.insight.report.attempts import AttemptFacts, attempts_of
from kempner.insight.report.cause import Kind, cause_of
from kempner.insight.report.page.words import duration
from kempner.insight.status.activity import Activity, Doing, decide
from kempner.insight.status.facts import CheckpointFacts, RankPlace, RunFacts
from kempner.insight.status.job import JobStatus
from kempner.insight.status.progress import Progress, curve, measure
from kempner.insight.status.ranks import RankGroup, SlowRank, gather, slowest, who_waits
from kempner.insight.words import name_or_count
from kempner.run.control.protocol import Phase
from kempner.run.record.events.attempt import AttemptEnded, AttemptFailed, RankReady
from kempner.run.record.events.stop import StopRequested
from kempner.run.record.gave_up import GaveUp

SHOWN_ENDS = 5
"""Interruptions that are shown: the last ones."""

STILL_AFTER, STILL_FACTOR = 10.0, 5.0
"""Seconds, and times the usual, without a new step after which it is told who waits for whom."""


@dataclass(frozen=True)
class EndOfAttempt:
    """How an attempt ended before the run's last step: at `time` (Unix, seconds), and why.

    `rank` failed first, on `node`, if one did.
    """

    attempt: int
    time: float
    kind: Kind
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
class Deadline:
    """What happens at `time` (Unix, seconds)."""

    time: float
    what: str


@dataclass(frozen=True)
class Status:
    """A run at `now` (Unix, seconds); what is not known is None, or empty.

    `done_at` is when the last step is made at the speed of the last ones; `fits` whether that is
    before the job's end, which is `job.ends_at`. `ends` are the last interruptions, oldest first.
    """

    now: float
    doing: Doing
    alive: bool | None
    progress: Progress
    attempt: AttemptStatus | None
    ends: tuple[EndOfAttempt, ...]
    checkpoint: CheckpointFacts | None
    done_at: float | None
    fits: bool | None
    deadline: Deadline | None
    waits_for: str
    slowest: SlowRank | None
    ranks: tuple[RankGroup, ...]
    job: JobStatus | None
    gave_up: GaveUp | None
    losses: tuple[float, ...]
    speeds: tuple[float, ...]
    unread: tuple[str, ...]

    @property
    def state(self) -> str:
        """The activity and its reason, for a person."""
        reason = self.doing.reason
        return f"{self.doing.activity}{f' ({reason})' if reason else ''}"

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it; docs/status.md lists the keys."""
        progress, attempt = self.progress, self.attempt
        return {
            "time": round(self.now, 3),
            "state": self.doing.activity.value,
            "reason": self.doing.reason,
            "alive": self.alive,
            "step": progress.step,
            "total_steps": progress.total,
            "loss": progress.loss,
            "eval_loss": progress.eval_loss,
            "tokens_per_second": progress.tokens_per_second,
            "mfu": progress.mfu,
            "seconds_per_step": progress.seconds_per_step,
            "seconds_left": progress.seconds_left,
            "done_at": self.done_at,
            "done_before_job_ends": self.fits,
            "attempt": None if attempt is None else vars(attempt),
            "interruptions": [vars(end) for end in self.ends],
            "checkpoint": None if self.checkpoint is None else _checkpoint(self.checkpoint),
            "deadline": None if self.deadline is None else vars(self.deadline),
            "waits_for": self.waits_for,
            "slowest": None if self.slowest is None else vars(self.slowest),
            "ranks": [_group(group) for group in self.ranks],
            "job": None if self.job is None else _job(self.job),
            "gave_up": None if self.gave_up is None else self.gave_up.fields(),
            "unread": list(self.unread),
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
    """The status that follows from these facts."""
    attempts = attempts_of(facts.history, {})
    last = attempts[-1] if attempts else None
    doing, progress = decide(facts, attempts), measure(facts.metrics, facts.total_steps)
    if doing.activity is Activity.TRAINING:
        doing = Doing(Activity.TRAINING, _stands_still(facts, progress, last))
    live = doing.activity.is_live and facts.alive is not False
    places = facts.ranks if live else ()
    done_at = _done_at(doing.activity, progress, facts.now)
    ends_at = None if facts.job is None else facts.job.ends_at
    return Status(
        now=facts.now,
        doing=doing,
        alive=facts.alive,
        progress=progress,
        attempt=None if last is None else _attempt(last),
        ends=_ends(attempts, live),
        checkpoint=facts.checkpoint,
        done_at=done_at,
        fits=None if done_at is None or ends_at is None else done_at <= ends_at,
        deadline=_deadline(facts, doing.activity, last),
        waits_for=_waits_for(facts, doing),
        slowest=slowest(places, last) if live else None,
        ranks=gather(places),
        job=facts.job,
        gave_up=facts.gave_up,
        losses=tuple(curve(facts.metrics, "loss")),
        speeds=tuple(curve(facts.metrics, "tokens_per_second")),
        unread=tuple(facts.unread),
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
    """How attempts ended, but the last one as long as it goes on."""
    found = []
    for attempt in attempts:
        unfinished = attempt is attempts[-1] and not attempt.over and (live or not attempt.stopped)
        if attempt.completed or unfinished:
            continue
        kind, cause, _ = cause_of(attempt)
        failed, ended = attempt.last(AttemptFailed), attempt.last(AttemptEnded)
        rank = None if ended is None or kind is Kind.STOP else ended.event.culprit
        node = "" if failed is None else failed.event.node
        found.append(EndOfAttempt(attempt.number, attempt.end, kind, cause, rank, node))
    return tuple(found[-SHOWN_ENDS:])


def _done_at(activity: Activity, progress: Progress, now: float) -> float | None:
    """When the last step is made if it goes on like this."""
    if activity not in _MOVING or progress.seconds_left is None:
        return None
    return max(now, (progress.logged_at or now) + progress.seconds_left)


_MOVING = (Activity.TRAINING, Activity.SAVING, Activity.EVALUATING)


def _deadline(facts: RunFacts, activity: Activity, last: AttemptFacts | None) -> Deadline | None:
    """The next moment at which something ends, whatever the ranks do."""
    found = []
    if activity is Activity.STOPPING and last is not None and not last.over:
        asked = [(e.time + e.event.seconds_left, e.event) for e in last.all(StopRequested)]
        found += [Deadline(time, "ranks that are still there are killed") for time, _ in asked]
    job = facts.job
    if job is not None and job.ends_at is not None:
        what = "the preemption takes the nodes" if job.preempted else "the job's time is over"
        found.append(Deadline(job.ends_at, what))
    if job is not None and job.begins_at is not None:
        found.append(Deadline(job.begins_at, "Slurm expects to start the job"))
    return min(found, key=lambda deadline: deadline.time, default=None)


def _waits_for(facts: RunFacts, doing: Doing) -> str:
    """What has to happen before the run goes on; empty while it does."""
    match doing.activity:
        case Activity.QUEUED:
            return "" if facts.job is None else facts.job.why_waiting
        case Activity.WAITING_FOR_STORAGE:
            return next(place.storage for place in facts.ranks if place.storage)
        case Activity.TRAINING:
            return who_waits(facts.ranks) if doing.reason else ""
        case Activity.STARTING | Activity.LOADING | Activity.STOPPING:
            return _last_ones(facts.ranks) if facts.alive else ""
    return ""


def _stands_still(facts: RunFacts, progress: Progress, last: AttemptFacts | None) -> str:
    """For how long no step was logged, if that is long; empty if not."""
    ready = 0.0 if last is None or last.ready_at is None else last.ready_at
    since = max(ready, progress.logged_at or 0.0)
    usual = progress.logged_every
    patience = max(STILL_AFTER, STILL_FACTOR * (usual or 0.0))
    if not since or facts.now - since <= patience or usual is None:
        return ""
    return f"no step for {duration(facts.now - since)}, usually one every {duration(usual)}"


def _last_ones(places: Sequence[RankPlace]) -> str:
    """The ranks that are behind the others on their way in or out; empty if none is."""
    order = {phase.value: number for number, phase in enumerate(Phase)}
    groups = sorted(gather(places), key=lambda group: (order.get(group.phase, 0), group.step))
    if len(groups) < 2 or len(groups[0].ranks) > len(places) // 2:
        return ""
    return f"{name_or_count(groups[0].ranks)} ({groups[0].place})"
