"""Events of the ledger: records with a name, and fields that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import TypeAdapter

from kempner.run.record.save_times import SaveSeconds

# The words after a type say what the field holds, with its unit: docs/events.md is made from them.
Step: TypeAlias = Annotated[int, "step"]
RankNumber: TypeAlias = Annotated[int, "rank"]
Place: TypeAlias = Annotated[
    str, "folder below the run of the program's loop whose checkpoint it is; empty for the first"
]
Sentence: TypeAlias = Annotated[str, "for a person to read"]


@dataclass(frozen=True)
class LedgerEvent:
    """One event. Its docstring says who writes it, and when: "By rank 0: when ...".

    An optional field is left out of the line while it has its default.
    """

    name: ClassVar[str]
    """As the ledger and the control channel spell it."""

    def to_fields(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        optional = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in optional or value != optional[name]
        }

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> Self:
        """The event that has these fields; others among them are passed over.

        Raises `ValueError` if one is missing, or of another type.
        """
        adapter = _ADAPTERS.get(cls) or _ADAPTERS.setdefault(cls, TypeAdapter(cls))
        event: Self = adapter.validate_python(dict(found))
        return event


_ADAPTERS: dict[type[LedgerEvent], TypeAdapter[Any]] = {}


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


@dataclass(frozen=True)
class StartedAnew(LedgerEvent):
    """By rank 0: when the run begins at step 0, because there is no checkpoint."""

    name: ClassVar[str] = "started"


@dataclass(frozen=True)
class Resumed(LedgerEvent):
    """By rank 0: when the state of a checkpoint is loaded, to go on from it."""

    name: ClassVar[str] = "resumed"
    step: Step
    place: Place = ""


@dataclass(frozen=True)
class CheckpointCommitted(LedgerEvent):
    """By rank 0: when a checkpoint is durable, and `latest` names it."""

    name: ClassVar[str] = "checkpoint_committed"
    step: Step
    bytes: Annotated[int, "size of its files in bytes"] = 0
    stage_seconds: Annotated[float | None, "seconds to copy the state"] = None
    write_seconds: Annotated[float | None, "seconds from then until all ranks wrote it"] = None
    commit_seconds: Annotated[float | None, "seconds from then until `latest` names it"] = None
    suspended: Annotated[bool, "whether Slurm suspended the job meanwhile"] = False
    place: Place = ""

    @classmethod
    def of(cls, step: int, size: int, took: SaveSeconds) -> Self:
        """Of a save of `size` bytes; times are kept to the millisecond."""
        stage, write, commit = (round(s, 3) for s in (took.stage, took.write, took.commit))
        return cls(step, size, stage, write, commit)

    @property
    def took(self) -> SaveSeconds | None:
        """How long the save took; None if the event does not say so."""
        stage, write, commit = self.stage_seconds, self.write_seconds, self.commit_seconds
        if stage is None or write is None or commit is None:
            return None
        return SaveSeconds(stage, write, commit)


@dataclass(frozen=True)
class CheckpointFailed(LedgerEvent):
    """By rank 0: when a save failed. The checkpoint before it is intact."""

    name: ClassVar[str] = "checkpoint_failed"
    step: Step
    reasons: Annotated[Mapping[str, str], "what went wrong, by rank"]


@dataclass(frozen=True)
class CheckpointDamaged(LedgerEvent):
    """By rank 0: when a checkpoint does not verify, and is set aside."""

    name: ClassVar[str] = "checkpoint_damaged"
    step: Step
    kept_as: Annotated[str, "its folder's new name"]
    damage: Annotated[tuple[str, ...], "the first ten files, and what is wrong with each"]


@dataclass(frozen=True)
class StepSalvaged(LedgerEvent):
    """By the supervisor: when what the ranks of an attempt held in memory has become a
    checkpoint."""

    name: ClassVar[str] = "step_salvaged"
    step: Step
    saved: Annotated[int, "steps that would have had to be made again"]
    bytes: Annotated[int, "size of its files in bytes"]
    seconds: Annotated[float, "seconds that it took"]
    from_buddies: Annotated[int, "ranks whose part came from another node's memory"] = 0


@dataclass(frozen=True)
class SalvageDismissed(LedgerEvent):
    """By the supervisor: when no step could be made after such a checkpoint, and the one before it
    is used again."""

    name: ClassVar[str] = "salvage_dismissed"
    step: Step
    back_to: Annotated[int, "step of the checkpoint before"]
    kept_as: Annotated[str, "its folder's new name"]


@dataclass(frozen=True)
class OwnProgramStands:
    """Where a program of the user's own stands in a hang, by its stacks."""

    step: int
    places: Mapping[str, str]
    busy: int | None = None


@dataclass(frozen=True)
class HangFound(LedgerEvent):
    """By the supervisor: when no rank moves any more, and the attempt is ended for it."""

    name: ClassVar[str] = "hang"
    reason: Sentence
    laggard: Annotated[int | None, "rank that the others wait for, as far as can be told"]
    waiting: Annotated[Mapping[str, Sequence[int]], "ranks by what they wait for others in"]
    processes: Annotated[tuple[str, ...], "what the system says of suspicious processes"]
    seconds: Annotated[float | None, "seconds since a rank last moved"] = None
    evidence_seconds: Annotated[
        float | None, "how many of them were spent on collecting evidence"
    ] = None
    own_program: Annotated[
        OwnProgramStands | None,
        "of a user's own program: its last `step` that was done, the `places` in its code by rank, "
        "and the rank that may have been at work there (`busy`), if one was",
    ] = None


@dataclass(frozen=True)
class ConnectionsStalled(LedgerEvent):
    """By any rank: in a hang, when connections of its node deliver nothing.

    For the supervisor, which does not put it into the ledger.
    """

    name: ClassVar[str] = "stalled"
    ends: Annotated[tuple[tuple[str, str], ...], "near and far address of each connection"]


@dataclass(frozen=True)
class StandsAt(LedgerEvent):
    """By any rank: in a hang of a program of the user's own, to tell where its main thread is.

    For the supervisor, which does not put it into the ledger.
    """

    name: ClassVar[str] = "stands_at"
    line: Annotated[str, "the innermost line of the user's code, as FILE:LINE, empty if unknown"]
    collective: Annotated[str, "the collective that it waits in, empty if there is none"]


@dataclass(frozen=True)
class StragglerFound(LedgerEvent):
    """By the supervisor: when the others begin to wait for one rank that is slower."""

    name: ClassVar[str] = "straggler"
    rank: RankNumber
    node: Annotated[str | None, "its node"]
    worked: Annotated[float, "seconds per step that it works"]
    usual: Annotated[float, "seconds per step that the others work"]
    lost: Annotated[float, "share (0 to 1) of each step that the others wait"]
    reason: Sentence


@dataclass(frozen=True)
class SlowDownFound(LedgerEvent):
    """By the supervisor: when steps begin to take longer than they used to."""

    name: ClassVar[str] = "slow_down"
    step: Annotated[float, "seconds per step now"]
    usual: Annotated[float, "seconds per step before"]
    reason: Sentence


@dataclass(frozen=True)
class Recovered(LedgerEvent):
    """By the supervisor: when a straggler or a slow run is as fast as before again."""

    name: ClassVar[str] = "recovered"
    of: Annotated[str, "name of the event that said how it began"]


@dataclass(frozen=True)
class MemoryLow(LedgerEvent):
    """By the supervisor: when a node has less memory left than `resilience.memory_reserve`."""

    name: ClassVar[str] = "memory_low"
    rank: Annotated[int, "the largest rank there"]
    node: Annotated[str | None, "its node"]
    reason: Sentence


@dataclass(frozen=True)
class ResourceGrowth(LedgerEvent):
    """By the supervisor: when a rank's memory or open files grow so that a day uses them up."""

    name: ClassVar[str] = "growth"
    rank: RankNumber
    node: Annotated[str | None, "its node"]
    reason: Sentence


@dataclass(frozen=True)
class StorageWaited(LedgerEvent):
    """By the supervisor or any rank: when storage that failed works again.

    Waits within ten seconds of one that was told are told together, with the next.
    """

    name: ClassVar[str] = "storage_waited"
    what: Annotated[str, "the file, and what was wrong with it, at last"]
    seconds: Annotated[float, "seconds that were waited in all"]
    tries: Annotated[int, "how often it was tried"]
    rank: Annotated[int | None, "rank that has waited, null for the supervisor"] = None


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds that a phase takes, as `count` times of it showed."""

    median: float
    spread: float
    count: int


@dataclass(frozen=True)
class PhaseDurationsLearned(LedgerEvent):
    """By the supervisor: at the end of an attempt, and every ten minutes until then."""

    name: ClassVar[str] = "phase_durations"
    ranks: Annotated[int, "how many"]
    phases: Annotated[
        Mapping[str, PhaseTimes],
        "by phase the median in seconds, what the 95th percentile has above it, and the count",
    ]


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


@dataclass(frozen=True)
class StopRequested(LedgerEvent):
    """By the supervisor: when it asks the ranks to stop, and again if less time is left or the
    reason is better known."""

    name: ClassVar[str] = "stop_requested"
    reason: Annotated[str, "why: a `StopReason`, such as `time_limit`"]
    sentence: Sentence
    seconds_left: Annotated[float, "seconds until the ranks are killed"]


@dataclass(frozen=True)
class Signalled(LedgerEvent):
    """By rank 0: when a signal asks the ranks to stop before the supervisor does.

    In a preemption Slurm signals the ranks alone, and only the supervisor can ask how long it
    gives.
    """

    name: ClassVar[str] = "signalled"


@dataclass(frozen=True)
class Stopped(LedgerEvent):
    """By rank 0: when the ranks leave before the last step, to go on from there later."""

    name: ClassVar[str] = "stopped"
    step: Annotated[int, "last step that was made"]
    reason: Annotated[str, "why: a `StopReason`, such as `time_limit`"]
    lost_steps: Annotated[int, "steps made since the last commit, to be made again"]
    sentence: Annotated[str, "more of the reason, for a person to read"] = ""


@dataclass(frozen=True)
class Completed(LedgerEvent):
    """By rank 0: when the last step is made and saved."""

    name: ClassVar[str] = "completed"
    step: Annotated[int, "last step that was made"]


@dataclass(frozen=True)
class Left(LedgerEvent):
    """By rank 0: when the program leaves its loop before the last step, of its own accord.

    The run is not complete: it goes on when the program is started again.
    """

    name: ClassVar[str] = "left"
    step: Annotated[int, "last step that was made"]
    steps: Annotated[int, "how many there are"]


@dataclass(frozen=True)
class Evaluated(LedgerEvent):
    """By rank 0: after an evaluation that was not cut short."""

    name: ClassVar[str] = "evaluated"
    step: Step
    loss: Annotated[float, "nats per token"]
    seconds: Annotated[float, "seconds that it took"]


@dataclass(frozen=True)
class StepSkipped(LedgerEvent):
    """By rank 0: when a step's loss or gradient norm is not finite, so that it changed nothing."""

    name: ClassVar[str] = "step_skipped"
    step: Step
    reason: Sentence
    in_a_row: Annotated[int, "suspicious steps in a row"]


@dataclass(frozen=True)
class LossSpike(LedgerEvent):
    """By rank 0: when a step's loss is far above those before."""

    name: ClassVar[str] = "loss_spike"
    step: Step
    reason: Sentence
    in_a_row: Annotated[int, "suspicious steps in a row"]


@dataclass(frozen=True)
class RolledBack(LedgerEvent):
    """By rank 0: when the run has gone back to a good checkpoint."""

    name: ClassVar[str] = "rolled_back"
    at: Annotated[int, "step at which the loss had gone astray for good"]
    to: Annotated[int, "step of the checkpoint"]
    start: Annotated[int, "first sample that is left out from now on"]
    end: Annotated[int, "first sample after those"]


@dataclass(frozen=True)
class Diverged(LedgerEvent):
    """By rank 0: when going back to a checkpoint would not help, so that the run is ended."""

    name: ClassVar[str] = "diverged"
    step: Annotated[int, "step at which the loss had gone astray for good"]
    reason: Sentence
