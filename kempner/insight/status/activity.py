"""What a run is doing now: one word, and how that is known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

from kempner.insight.report.attempts import AttemptFacts, cause_of
from kempner.insight.status.facts import RankPlace, RunFacts
from kempner.run.control.protocol import Phase
from kempner.run.output.units import name_or_count
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events import AttemptEnded, StopRequested
from kempner.run.record.history import Entry

SILENT_AFTER = 120.0
"""Seconds after which a rank has called its supervisor, or never will: some programs do not."""


class Activity(StrEnum):
    """What a run is doing."""

    NOT_STARTED = "not started"
    QUEUED = "queued"
    HEALTH_CHECK = "health check"
    STARTING = "starting"
    LOADING = "loading"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    WAITING_FOR_STORAGE = "waiting for storage"
    RUNNING = "running"
    """Its program does not say what it does."""
    STOPPING = "stopping"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"
    DEAD = "ended without a message"
    """It has no owner: its supervisor was killed, or its machine is gone."""
    GIVEN_UP = "given up"
    DONE = "completed"
    UNKNOWN = "running, or ended without a message"
    """The ledger says no more, and whether the run has an owner cannot be seen."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens unless a person does something."""
        return self in (Activity.GIVEN_UP, Activity.DONE)

    @property
    def is_live(self) -> bool:
        """Whether a process works on the run now."""
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
    """An activity, and a few words on why, or on how far it is; empty if nothing more is known."""

    activity: Activity
    reason: str = ""


def decide(facts: RunFacts, attempts: Sequence[AttemptFacts]) -> ActivityNote:
    """What a run does, by its facts; `attempts` are those that its history tells of."""
    last = attempts[-1] if attempts else None
    if facts.gave_up is not None:
        return ActivityNote(Activity.GIVEN_UP, facts.gave_up.reason)
    if last is not None and last.completed:
        ended = last.last(AttemptEnded)
        return ActivityNote(Activity.DONE, ended.event.reason if _failed(ended) and ended else "")
    waits = facts.job is not None and facts.job.waits
    if waits and facts.job is not None:
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
    """No attempt is known."""
    if facts.live.alive:
        return ActivityNote(Activity.HEALTH_CHECK)
    if facts.job is not None and facts.job.runs:
        return ActivityNote(Activity.STARTING, "its job runs, and the supervisor begins")
    return ActivityNote(Activity.NOT_STARTED)


def _not_owned(facts: RunFacts, last: AttemptFacts) -> ActivityNote:
    """The activity of a run without an owner, for which no job is known to wait."""
    if last.requeued_at is not None and facts.job is not None and facts.job.runs:
        return ActivityNote(Activity.STARTING, "its job runs again, and the supervisor begins")
    if last.requeued_at is not None and (facts.job is None or not facts.job.known):
        return ActivityNote(Activity.QUEUED, "its job went back into the queue")
    unbegun = facts.live.attempt is not None and facts.live.attempt > last.number
    if (unbegun or not last.over) and not last.stopped and facts.job is not None and facts.job.runs:
        return ActivityNote(
            Activity.UNKNOWN, "its job runs, and writes nothing to the run's directory"
        )
    if unbegun:
        return ActivityNote(Activity.DEAD, f"before attempt {facts.live.attempt} had begun")
    if last.over or last.stopped:
        return _ended(last)
    asked = last.stop_reason
    return ActivityNote(Activity.DEAD, f"asked to stop ({asked.words}) before" if asked else "")


def _ended(last: AttemptFacts) -> ActivityNote:
    """The last attempt is over, in order or not."""
    ended = last.last(AttemptEnded)
    if last.in_order and last.stop_reason and not _failed(ended):
        return ActivityNote(Activity.STOPPED, last.stop_reason.words)
    if last.stopped:
        return ActivityNote(Activity.STOPPED)
    if last.left_at is not None and ended is not None:
        return ActivityNote(Activity.STOPPED, ended.event.reason)
    _, cause, _ = cause_of(last)
    return ActivityNote(Activity.FAILED, cause)


def _failed(ended: Entry[AttemptEnded] | None) -> bool:
    return ended is not None and ended.event.code not in (ExitCode.COMPLETED, ExitCode.STOPPED)


def _between(last: AttemptFacts) -> ActivityNote:
    """The last attempt is over, and its supervisor is still there."""
    doing = _ended(last)
    if doing.activity is Activity.STOPPED and not last.stop_reason.changes_nodes:
        where = "its job goes back into the queue" if last.requeued_at else "every rank has left"
        return ActivityNote(
            Activity.STOPPING, f"{doing.reason}; {where}" if doing.reason else where
        )
    if last.given_up is not None:
        return ActivityNote(Activity.GIVEN_UP, last.given_up.event.reason)
    return ActivityNote(Activity.RESTARTING, doing.reason)


def _in_attempt(facts: RunFacts, last: AttemptFacts) -> ActivityNote:
    """The last attempt goes on, as far as the ledger knows."""
    if (hang := last.hang()) is not None:
        return ActivityNote(Activity.STOPPING, f"a hang: {hang.event.reason}")
    if last.stop_reason:
        asked = last.last(StopRequested)
        said = "" if asked is None else asked.event.sentence
        words = last.stop_reason.words
        return ActivityNote(
            Activity.STOPPING, f"{words}: {said}" if said and said != words else words
        )
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
    for phase, activity in ((Phase.SAVE, Activity.SAVING), (Phase.EVAL, Activity.EVALUATING)):
        if phase in phases:
            there = [place for place in facts.live.ranks if place.phase == phase]
            return ActivityNote(activity, _describe_ranks(there, facts.live.ranks))
    if phases and phases <= {Phase.COMPILE}:
        return ActivityNote(Activity.STARTING, "the first step")
    return ActivityNote(Activity.TRAINING)


def _on_the_way(facts: RunFacts, last: AttemptFacts, phases: Collection[str]) -> ActivityNote:
    """No rank has said that it begins with a step."""
    if not phases:
        if facts.now - last.begin > SILENT_AFTER:
            return ActivityNote(Activity.RUNNING, "its program does not report steps")
        if last.started.own_program:
            return ActivityNote(Activity.RUNNING, "its program has not reported a step yet")
        return ActivityNote(Activity.STARTING, "the ranks are launched")
    if last.started.own_program and Phase.STEP in phases:
        return ActivityNote(Activity.TRAINING)  # one rank of it may speak for all
    missing = last.started.ranks - len(facts.live.ranks)
    if missing > 0:
        told = f"{len(facts.live.ranks):,} of {last.started.ranks:,} ranks have connected"
        return ActivityNote(Activity.STARTING, told)
    for phase, activity, words in _FIRST_PHASES:
        there = [place for place in facts.live.ranks if place.phase == phase]
        if there:
            return ActivityNote(activity, f"{_describe_ranks(there, facts.live.ranks)}{words}")
    return ActivityNote(Activity.RUNNING)


_FIRST_PHASES = (
    (Phase.START, Activity.STARTING, " import"),
    (Phase.RENDEZVOUS, Activity.STARTING, " meet"),
    (Phase.LOAD, Activity.LOADING, ""),
    (Phase.COMPILE, Activity.STARTING, ": the first step"),
)
"""What a rank goes through before it trains; the run is where its last rank is."""


def _describe_ranks(some: Sequence[RankPlace], ranks: Sequence[RankPlace]) -> str:
    """Those ranks, or how many they are."""
    if len(some) == len(ranks):
        return "all ranks"
    return name_or_count(sorted(place.rank for place in some))
