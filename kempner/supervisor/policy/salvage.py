"""Decides what becomes of the steps that an attempt has left in memory: pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kempner.checkpoint.slots.pour import Offer
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Resumed,
    SalvageDismissed,
    StepSalvaged,
)
from kempner.run.record.history import RunHistory
from kempner.supervisor.policy.outcome import OUT_OF_MEMORY

WORTH_IT = (
    ExitCode.STOPPED,
    ExitCode.CRASHED,
    ExitCode.PEERS_LOST,
    ExitCode.HUNG,
    ExitCode.STORAGE_UNAVAILABLE,
    ExitCode.CHECKPOINT_FAILED,
)
"""Ends of an attempt after which the state of its last steps is as good as any other."""


WAIT_AT_LEAST = 20.0
"""Seconds that a salvage gets in any case: storage that hiccups is back by then, as a rule."""


@dataclass(frozen=True)
class SalvageDecision:
    """The step to salvage, None for none; and why."""

    step: int | None
    reason: str


def decide_salvage(
    offers: Iterable[Offer], committed: int | None, dismissed: Collection[int]
) -> SalvageDecision:
    """The newest step that all ranks of the attempt hold, if it is newer than the last commit.

    `dismissed` are steps that were salvaged before and did not help.
    """
    by_step: dict[int, dict[int, Offer]] = defaultdict(dict)
    for offer in offers:
        by_step[offer.step][offer.rank] = offer
    if not by_step:
        return SalvageDecision(None, "no step is held in memory")
    whole = [step for step, held in by_step.items() if _is_whole(held)]
    if not whole:
        return SalvageDecision(None, "the memory of some ranks is lost")
    step = max(whole)
    if committed is not None and step <= committed:
        return SalvageDecision(None, "nothing newer than the last checkpoint is held in memory")
    if step in dismissed:
        return SalvageDecision(None, f"step {step} was salvaged before, and did not help")
    return SalvageDecision(step, "all ranks hold it")


def salvage_patience(history: RunHistory, attempt: int, now: float, patience: float) -> float:
    """Seconds for which a salvage may hold up the restart: as long as what it saves took to make,
    since the last commit or the begin of the attempt; `patience` at most.

    `now` in seconds since the epoch.
    """
    begun = history.entries(AttemptStarted, CheckpointCommitted)
    since = max((e.time for e in begun if e.attempt == attempt), default=now)
    return min(patience, max(WAIT_AT_LEAST, now - since))


def why_not_kept(wanted: bool, history: RunHistory, since: float) -> str | None:
    """Why steps are not kept in memory, although that is `wanted`; None if they are, or were not.

    Their memory counts for the job: once the kernel has killed a rank for want of it since a time
    (seconds since the epoch), there is more room without them.
    """
    ended = [e.event for e in history.entries(AttemptEnded) if e.time >= since]
    if wanted and any(OUT_OF_MEMORY in event.reason for event in ended):
        return "the kernel has killed a rank for want of memory, and without them there is more"
    return None


def in_vain(history: RunHistory, attempt: int, reached: int) -> int | None:
    """The salvaged step from which an attempt has gone on without making another; None if not so.

    `reached` is the step that it was in when it failed.
    """
    salvaged = history.entries(StepSalvaged)
    if not salvaged or salvaged[-1].event.step != history.last_step:
        return None
    step = salvaged[-1].event.step
    resumed = [e for e in history.entries(Resumed) if e.attempt == attempt]
    if salvaged[-1].attempt >= attempt or not resumed or resumed[-1].event.step != step:
        return None
    if reached > step + 1:
        return None
    return None if step in dismissed_steps(history) else step


def dismissed_steps(history: RunHistory) -> list[int]:
    """The steps that were salvaged and did not help."""
    return [event.step for event in history.events(SalvageDismissed)]


def _is_whole(held: dict[int, Offer]) -> bool:
    """Whether these are the parts of all ranks, made by the same plan, and what they share is the
    same."""
    first = next(iter(held.values()))
    alike = {(each.world, each.plan, each.shared, each.since) for each in held.values()}
    return len(alike) == 1 and held.keys() == set(range(first.world))
