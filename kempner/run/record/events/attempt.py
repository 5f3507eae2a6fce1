"""Events of an attempt: how it begins, fails and ends, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from kempner.run.record.events.base import LedgerEvent, Sentence


@dataclass(frozen=True)
class AttemptStarted(LedgerEvent):
    """By the supervisor, or rank 0 without one: when an attempt begins."""

    name: ClassVar[str] = "attempt_started"
    ranks: Annotated[int, "how many"]
    job: Annotated[str | None, "Slurm's id of the job"] = None
    restarts: Annotated[int | None, "times that the job was requeued before"] = None
    nodes: Annotated[str | None, "the job's nodes, as Slurm abbreviates them"] = None
    launcher: Annotated[str | None, "what started the ranks, without a supervisor"] = None
    own_program: Annotated[bool, "a program of the user's own, which need not report"] = False
    process_began: Annotated[
        float | None, "when the supervisor's process began, in seconds since the epoch"
    ] = None


@dataclass(frozen=True)
class RankReady(LedgerEvent):
    """By rank 0: when it has loaded what it goes on from, and begins with the first step."""

    name: ClassVar[str] = "ready_to_train"
    step: Annotated[int, "last step that is done"]
    device: Annotated[str, "what it trains on, as PyTorch names it"]
    reached: Annotated[Mapping[str, float], "seconds from the start of the process, by phase"]


@dataclass(frozen=True)
class AttemptEnded(LedgerEvent):
    """By the supervisor: when no rank of an attempt is left."""

    name: ClassVar[str] = "attempt_ended"
    code: Annotated[int, "exit code that the attempt comes to"]
    reason: Sentence
    culprit: Annotated[int | None, "rank that failed first"]
    exits: Annotated[Mapping[str, int | None], "exit status by rank, null if it is not known"]
    seconds: Annotated[float | None, "seconds since the first rank ended"] = None
    left_at: Annotated[
        int | None, "step after which a program of the user's own left its loop before the last one"
    ] = None


@dataclass(frozen=True)
class ProgramAdvanced(LedgerEvent):
    """By the supervisor: when no rank is left of a program that does not report what it saves, and
    it got further than before, by its step or by the time that it ran. Failures and requeues before
    it count no more."""

    name: ClassVar[str] = "program_advanced"
    step: Annotated[int | None, "furthest step that it told, null if it told none"]
    seconds: Annotated[float, "seconds from its launch until the first rank ended"]


@dataclass(frozen=True)
class AttemptFailed(LedgerEvent):
    """By the supervisor: after an attempt that failed, before it decides what to do about it."""

    name: ClassVar[str] = "attempt_failed"
    step: Annotated[int, "step that the first rank to fail was in"]
    committed: Annotated[int | None, "last step that was saved, null if there is none"]
    raised: Annotated[str, "what that rank raised, empty if it did not say"]
    node: Annotated[str, "node of that rank, if it is known"] = ""
    node_lost: Annotated[bool, "whether the node or the network is at fault, not the program"] = (
        False
    )
    code: Annotated[int, "exit code that the attempt comes to"] = 1
    unstarted: Annotated[
        int | None, "exit status of a program that ended within seconds, before it said anything"
    ] = None


@dataclass(frozen=True)
class Restarting(LedgerEvent):
    """By the supervisor: when it starts the ranks again after a failure."""

    name: ClassVar[str] = "restarting"
    reason: Sentence


@dataclass(frozen=True)
class RunGivenUp(LedgerEvent):
    """By the supervisor: when a restart cannot help. The file `GAVE_UP` says the same, if any step
    was made.
    """

    name: ClassVar[str] = "gave_up"
    code: Annotated[int, "exit code of the run"]
    reason: Sentence
    see: Annotated[tuple[str, ...], "files that tell more"]
    advice: Annotated[str, "what to do"]
    rank: Annotated[int | None, "rank that failed first"] = None
    step: Annotated[int, "step that it was in"] = 0
    node: Annotated[str, "its node"] = ""
    raised: Annotated[str, "what it raised"] = ""


@dataclass(frozen=True)
class FaultsPlanned(LedgerEvent):
    """By rank 0: when faults are to be injected, of any rank or attempt."""

    name: ClassVar[str] = "faults_planned"
    faults: Annotated[tuple[str, ...], "each as it was asked for"]
