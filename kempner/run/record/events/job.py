"""Events of the Slurm job in which attempts run, and of its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from kempner.run.record.events.base import LedgerEvent, Sentence


@dataclass(frozen=True)
class Requeued(LedgerEvent):
    """By the supervisor, or a rank that outlives it: when it puts the job back into the queue."""

    name: ClassVar[str] = "requeued"
    step: Annotated[int | None, "last step that was saved, null if there is none"]
    job: Annotated[str, "Slurm's id of the job"]
    restarts: Annotated[int | None, "times that the job was requeued before"] = None
    nodes: Annotated[str | None, "the job's nodes, as Slurm abbreviates them"] = None
    reason: Sentence = ""
    preempted: Annotated[bool, "whether Slurm preempts the job"] = False
    by_rank: Annotated[int | None, "rank that does it, since the supervisor is gone"] = None
    without: Annotated[tuple[str, ...], "nodes that it is kept away from"] = ()


@dataclass(frozen=True)
class JobHandedBack(LedgerEvent):
    """By the supervisor: when Slurm has taken the job back. Later attempts keep as much time free
    at the end of the job."""

    name: ClassVar[str] = "handed_back"
    seconds: Annotated[float, "seconds since the last rank left, or was killed"]


@dataclass(frozen=True)
class NotRequeued(LedgerEvent):
    """By the supervisor: when it does not put a run that could go on back into the queue, or Slurm
    refuses to."""

    name: ClassVar[str] = "not_requeued"
    step: Annotated[int | None, "last step that was saved, null if there is none"]
    reason: Sentence


@dataclass(frozen=True)
class Resubmitted(LedgerEvent):
    """By the supervisor: after a refused requeue, when the run goes on as another job."""

    name: ClassVar[str] = "resubmitted"
    job: Annotated[str, "Slurm's id of the job that ends"]
    as_job: Annotated[str, "Slurm's id of the job that follows"]


@dataclass(frozen=True)
class NodeSuspected(LedgerEvent):
    """By the supervisor or any rank: when there is evidence that a node is not fit for ranks."""

    name: ClassVar[str] = "suspect"
    node: Annotated[str, "its name"]
    reason: Sentence


@dataclass(frozen=True)
class NodesTakenBack(LedgerEvent):
    """By the supervisor: before it starts the ranks on nodes that were left out, and are well
    again. What was said against them before counts no more."""

    name: ClassVar[str] = "nodes_taken_back"
    nodes: Annotated[tuple[str, ...], "their names"]
    reason: Sentence


@dataclass(frozen=True)
class NodesJoined(LedgerEvent):
    """By the supervisor: before it starts ranks on nodes of other jobs that have joined the run
    (`kempner join`)."""

    name: ClassVar[str] = "nodes_joined"
    nodes: Annotated[tuple[str, ...], "their names"]
    jobs: Annotated[tuple[str, ...], "Slurm's ids of their jobs, in the same order"]


@dataclass(frozen=True)
class NodesLeft(LedgerEvent):
    """By the supervisor: before it starts the ranks without nodes of other jobs that had joined."""

    name: ClassVar[str] = "nodes_left"
    nodes: Annotated[tuple[str, ...], "their names"]
    reason: Sentence
    lost: Annotated[bool, "whether they were gone without a word"] = False
