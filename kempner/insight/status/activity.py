"""What a run is doing now, decided from its facts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from kempner.insight.attempts import AttemptFacts, cause_of
from kempner.insight.run_reader import RankPlace, RunFacts
from kempner.run.control.protocol import Phase
from kempner.run.output.units import name_or_count
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events import StopRequested

SILENT_AFTER = 120.0
"""Seconds within which a rank reports to its supervisor, unless its program never does."""


class Activity(StrEnum):
    NOT_STARTED = "not started"
    QUEUED = "queued"
    HEALTH_CHECK = "health check"
    STARTING = "starting"
    LOADING = "loading"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    WAITING_FOR_STORAGE = "waiting for storage"
    RUNNING = "running"  # its program does not report its phase
    STOPPING = "stopping"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"
    DEAD = "ended without a message"
    """Its supervisor was killed, or its machine is gone."""
    GIVEN_UP = "given up"
    DONE = "completed"
    UNKNOWN = "running, or ended without a message"
    """The ledger has no end, and it is unknown whether the run has an owner."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens until a person acts."""
        return self in (Activity.GIVEN_UP, Activity.DONE)

    @property
    def is_live(self) -> bool:
        return self in _LIVE


_LIVE = frozenset(
    (
        Activity.HEALTH_CHECK,
        Activity.STARTING,
        Activity.LOADING,
        Activity.TRAINING,
        Activity.EVALUATING,
        Activity.SAVING,
        Activity.WAITING_FOR_STORAGE,
        Activity.RUNNING,
        Activity.STOPPING,
        Activity.RESTARTING,
    )
)


class ActivityNote(NamedTuple):
    """An activity, with a reason or progress in a few words; empty if unknown."""

    activity: Activity
    reason: str = ""


def decide(facts: RunFacts) -> ActivityNote:
    last = facts.attempts[-1] if facts.attempts else None
    if facts.gave_up is not None:
        return ActivityNote(Activity.GIVEN_UP, facts.gave_up.reason)
    if last is not None and last.completed:
        return ActivityNote(
            Activity.DONE, last.ended.reason if _failed(last) and last.ended else ""
        )
    if facts.job is not None and facts.job.waits:
        return ActivityNote(Activity.QUEUED, facts.job.why_waiting)
    if last is None:
        return _before_the_first(facts)
    if facts.live.alive is False:
        return _not_owned(facts, last)
    if facts.live.attempt is not None and facts.live.attempt > last.number and facts.live.alive:
        return ActivityNote(Activity.HEALTH_CHECK, f"before attempt {facts.live.attempt}")
    if last.over:
        return _between(last) if facts.live.alive else _ended(last)
    return _in_attempt(facts, last)


def _before_the_first(facts: RunFacts) -> ActivityNote:
    if facts.live.alive:
        return ActivityNote(Activity.HEALTH_CHECK)
    if facts.job is not None and facts.job.runs:
        return ActivityNote(Activity.STARTING, "its job runs, and the supervisor begins")
    return ActivityNote(Activity.NOT_STARTED)


def _not_owned(facts: RunFacts, last: AttemptFacts) -> ActivityNote:
    job_runs = facts.job is not None and facts.job.runs
    if last.requeued_at is not None and job_runs:
        return ActivityNote(Activity.STARTING, "its job runs again, and the supervisor begins")
    if last.requeued_at is not None and (facts.job is None or not facts.job.over):  # COMPLETING
        return ActivityNote(Activity.QUEUED, "its job went back into the queue")
    unbegun = facts.live.attempt is not None and facts.live.attempt > last.number
    if (unbegun or not last.over) and not last.stopped and job_runs:
        silent = "its job runs, and writes nothing to the run's directory"
        return ActivityNote(Activity.UNKNOWN, silent)
    if unbegun:
        return ActivityNote(Activity.DEAD, f"before attempt {facts.live.attempt} had begun")
    if last.over or last.stopped:
        return _ended(last)
    asked = last.stop_reason
    return ActivityNote(Activity.DEAD, f"asked to stop ({asked.words}) before" if asked else "")


def _ended(last: AttemptFacts) -> ActivityNote:
    if last.in_order and last.stop_reason and not _failed(last):
        return ActivityNote(Activity.STOPPED, last.stop_reason.words)
    if last.stopped:
        return ActivityNote(Activity.STOPPED)
    if last.left_at is not None and last.ended is not None:
        return ActivityNote(Activity.STOPPED, last.ended.reason)
    return ActivityNote(Activity.FAILED, cause_of(last).cause)


def _failed(last: AttemptFacts) -> bool:
    ended = last.ended
    return ended is not None and ended.code not in (ExitCode.COMPLETED, ExitCode.STOPPED)


def _between(last: AttemptFacts) -> ActivityNote:
    doing = _ended(last)
    if doing.activity is Activity.STOPPED and not last.stop_reason.changes_nodes:
        where = "its job goes back into the queue" if last.requeued_at else "every rank has left"
        reason = f"{doing.reason}; {where}" if doing.reason else where
        return ActivityNote(Activity.STOPPING, reason)
    if last.given_up is not None:
        return ActivityNote(Activity.GIVEN_UP, last.given_up.event.reason)
    return ActivityNote(Activity.RESTARTING, doing.reason)


def _in_attempt(facts: RunFacts, last: AttemptFacts) -> ActivityNote:
    if (hang := last.hang()) is not None:
        return ActivityNote(Activity.STOPPING, f"a hang: {hang.event.reason}")
    if last.stop_reason:
        asked = last.last(StopRequested)
        sentence = "" if asked is None else asked.event.sentence
        words = last.stop_reason.words
        reason = f"{words}: {sentence}" if sentence and sentence != words else words
        return ActivityNote(Activity.STOPPING, reason)
    if facts.live.alive is None:
        return ActivityNote(Activity.UNKNOWN)
    stuck = [place for place in facts.live.ranks if place.storage]
    if stuck:
        return ActivityNote(Activity.WAITING_FOR_STORAGE, _describe_ranks(stuck, facts.live.ranks))
    return _by_phase(facts, last)


def _by_phase(facts: RunFacts, last: AttemptFacts) -> ActivityNote:
    phases = {place.phase for place in facts.live.ranks}
    if last.ready_at is None:
        return _on_the_way(facts, last, phases)
    if phases and phases <= {Phase.EXIT}:
        return ActivityNote(Activity.STOPPING, "the ranks leave")
    if phases and phases <= {Phase.COMPILE}:
        return ActivityNote(Activity.STARTING, "the first step")
    return _first_of(_BETWEEN_STEPS, facts.live.ranks) or ActivityNote(Activity.TRAINING)


def _on_the_way(facts: RunFacts, last: AttemptFacts, phases: Collection[str]) -> ActivityNote:
    """The activity before any rank has reported its first step."""
    if not phases:
        if facts.now - last.begin > SILENT_AFTER:
            return ActivityNote(Activity.RUNNING, "its program does not report steps")
        if last.started.own_program:
            return ActivityNote(Activity.RUNNING, "its program has not reported a step yet")
        return ActivityNote(Activity.STARTING, "the ranks are launched")
    if last.started.own_program and Phase.STEP in phases:
        return ActivityNote(Activity.TRAINING)  # one rank of it may speak for all
    if len(facts.live.ranks) < last.started.ranks:
        reason = f"{len(facts.live.ranks):,} of {last.started.ranks:,} ranks have connected"
        return ActivityNote(Activity.STARTING, reason)
    return _first_of(_FIRST_PHASES, facts.live.ranks) or ActivityNote(Activity.RUNNING)


_BETWEEN_STEPS = ((Phase.SAVE, Activity.SAVING, ""), (Phase.EVAL, Activity.EVALUATING, ""))

_FIRST_PHASES = (
    (Phase.START, Activity.STARTING, " import"),
    (Phase.RENDEZVOUS, Activity.STARTING, " meet"),
    (Phase.LOAD, Activity.LOADING, ""),
    (Phase.COMPILE, Activity.STARTING, ": the first step"),
)
"""The phases before training; the run is in the phase of its last rank."""


def _first_of(
    phases: Iterable[tuple[Phase, Activity, str]], ranks: Sequence[RankPlace]
) -> ActivityNote | None:
    for phase, activity, words in phases:
        if there := [place for place in ranks if place.phase == phase]:
            return ActivityNote(activity, f"{_describe_ranks(there, ranks)}{words}")
    return None


def _describe_ranks(some: Sequence[RankPlace], ranks: Sequence[RankPlace]) -> str:
    """Name the ranks, or count them if the names are too long."""
    if len(some) == len(ranks):
        return "all ranks"
    return name_or_count(sorted(place.rank for place in some))
