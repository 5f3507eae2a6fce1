"""The status of a run: what its facts come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from kempner.run.record.events.checkpoint import CheckpointCommitted
from kempner.run.record.events.stop import StopRequested
from kempner.run.record.save_times import nearest_rank

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
class Outlook:
    """What comes next: `done_at` (Unix, seconds) is when the last step is made at the speed of the
    last ones, `fits` whether that is before the job's end, and `deadline` the next one.
    """

    done_at: float | None
    fits: bool | None
    deadline: Deadline | None


@dataclass(frozen=True)
class RankStatus:
    """Ranks in the same place together, the slowest one if one stands out, and what has to happen
    before they go on; empty while they do.
    """

    groups: tuple[RankGroup, ...]
    slowest: SlowRank | None
    waits_for: str


@dataclass(frozen=True)
class Status:
    """A run by its facts. `ends` are the last interruptions, oldest first."""

    facts: RunFacts
    doing: Doing
    progress: Progress
    attempt: AttemptStatus | None
    ends: tuple[EndOfAttempt, ...]
    outlook: Outlook
    ranks: RankStatus

    @property
    def now(self) -> float:
        """When it was read, in seconds since the epoch."""
        return self.facts.now

    @property
    def job(self) -> JobStatus | None:
        """Slurm's view of the job."""
        return self.facts.job

    @property
    def state(self) -> str:
        """The activity and its reason, for a person."""
        reason = self.doing.reason
        return f"{self.doing.activity}{f' ({reason})' if reason else ''}"

    def curve(self, key: str) -> list[float]:
        """The last values of a number of the metrics."""
        return curve(self.facts.metrics.lines, key)

    def later(self, seconds: float, *wrong: str) -> Status:
        """The same, read so many seconds ago, with what has gone wrong since."""
        unread = (*self.facts.unread, *wrong)
        return replace(self, facts=replace(self.facts, now=self.now + seconds, unread=unread))

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it; docs/status.md lists the keys."""
        facts, progress, outlook = self.facts, self.progress, self.outlook
        return {
            "time": round(self.now, 3),
            "state": self.doing.activity.value,
            "reason": self.doing.reason,
            "alive": facts.live.alive,
            "step": progress.step,
            "total_steps": progress.total,
            "loss": progress.loss,
            "eval_loss": progress.eval_loss,
            "tokens_per_second": progress.pace.tokens_per_second,
            "mfu": progress.pace.mfu,
            "seconds_per_step": progress.pace.seconds_per_step,
            "seconds_left": progress.pace.seconds_left,
            "waited": dict(progress.pace.waited),
            "done_at": outlook.done_at,
            "done_before_job_ends": outlook.fits,
            "attempt": None if self.attempt is None else vars(self.attempt),
            "interruptions": [vars(end) for end in self.ends],
            "checkpoint": None if facts.checkpoint is None else _checkpoint(facts.checkpoint),
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
    """The status that follows from these facts."""
    # By their numbers: by their times, a clock that was set back would put the last one earlier.
    attempts = sorted(attempts_of(facts.history, {}), key=lambda attempt: attempt.number)
    last = attempts[-1] if attempts else None
    progress = measure(facts.metrics.lines, facts.metrics.total_steps)
    if progress.step is None:
        progress = replace(progress, step=_told_step(facts, attempts))
    doing = decide(facts, attempts)
    still = _stands_still(facts, progress, last) if doing.activity in _BETWEEN_STEPS else ""
    if still:
        doing = Doing(doing.activity, f"{doing.reason}: {still}" if doing.reason else still)
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


def _told_step(facts: RunFacts, attempts: Sequence[AttemptFacts]) -> int | None:
    """How far a program is that writes no metrics, if it says so."""
    told = [place.step for place in facts.live.ranks] + [a.known_step for a in attempts]
    return max(told, default=0) or None


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


def _outlook(
    facts: RunFacts,
    activity: Activity,
    progress: Progress,
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
"""What should not keep a run long from its next step; how long an evaluation takes is not known."""


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


def _waits_for(facts: RunFacts, activity: Activity, still: str) -> str:
    """What has to happen before the run goes on; empty while it does."""
    match activity:
        case Activity.QUEUED:
            return "" if facts.job is None else facts.job.why_waiting
        case Activity.WAITING_FOR_STORAGE:
            return next(place.storage for place in facts.live.ranks if place.storage)
        case Activity.TRAINING:
            return who_waits(facts.live.ranks) if still else ""
        case Activity.SAVING:
            return _slow_storage(facts) if still else ""
        case Activity.STARTING | Activity.LOADING | Activity.STOPPING:
            return _last_ones(facts.live.ranks) if facts.live.alive else ""
    return ""


def _stands_still(facts: RunFacts, progress: Progress, last: AttemptFacts | None) -> str:
    """For how long no step was logged, if that is long; empty if not."""
    ready = 0.0 if last is None or last.ready_at is None else last.ready_at
    since = max(ready, progress.logged_at or 0.0)
    usual = progress.pace.logged_every
    patience = max(STILL_AFTER, STILL_FACTOR * (usual or 0.0))
    if not since or facts.now - since <= patience or usual is None:
        return ""
    return f"no step for {duration(facts.now - since)}, usually one every {duration(usual)}"


def _slow_storage(facts: RunFacts) -> str:
    """What is known of a save that holds the run up for long: training waits for its files."""
    took = [c.took.total for c in facts.history.events(CheckpointCommitted) if c.took is not None]
    usual = nearest_rank(took, 0.5)
    told = "" if usual is None else f"; a save usually takes {duration(usual)}"
    return f"storage: the files of a checkpoint are still being written{told}"


def _last_ones(places: Sequence[RankPlace]) -> str:
    """The ranks that are behind the others on their way in or out; empty if none is."""
    order = {phase.value: number for number, phase in enumerate(Phase)}
    groups = sorted(gather(places), key=lambda group: (order.get(group.phase, 0), group.step))
    if len(groups) < 2 or len(groups[0].ranks) > len(places) // 2:
        return ""
    return f"{name_or_count(groups[0].ranks)} ({groups[0].place})"
