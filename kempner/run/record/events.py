"""Events of the ledger: records with a name, and fields that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from kempner.run.process.durable_io import adapter_of
from kempner.run.record.save_times import SaveSeconds

# The text after a type says what the field holds, with its unit: docs/events.md is made from it.
Step: TypeAlias = Annotated[int, "step"]
RankNumber: TypeAlias = Annotated[int, "rank"]
Place: TypeAlias = Annotated[
    str, "folder below the run of the program's loop whose checkpoint it is; empty for the first"
]
Sentence: TypeAlias = Annotated[str, "for a person to read"]


@dataclass(frozen=True)
class LedgerEvent:
    """One event. Its docstring says who writes it, and when: "By rank 0: when ...". An optional
    field is left out of the line while it has its default."""

    name: ClassVar[str]
    """The name in the ledger and on the control channel."""

    def __init_subclass__(cls, name: str) -> None:
        cls.name = name

    def to_fields(self) -> dict[str, Any]:
        """The fields as JSON values."""
        optional = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in optional or value != optional[name]
        }

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> Self:
        """The event with these fields; unknown ones are ignored. Raises `ValueError` if one is
        missing or of another type."""
        event: Self = adapter_of(cls).validate_python(dict(found))
        return event


@dataclass(frozen=True)
class AttemptStarted(LedgerEvent, name="attempt_started"):
    """By the supervisor, or rank 0 without one: when an attempt begins."""

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
class RankReady(LedgerEvent, name="ready_to_train"):
    """By rank 0: when it has loaded its state, and begins with the first step."""

    step: Annotated[int, "last step that is done"]
    device: Annotated[str, "what it trains on, as PyTorch names it"]
    reached: Annotated[Mapping[str, float], "seconds from the start of the process, by phase"]


@dataclass(frozen=True)
class AttemptEnded(LedgerEvent, name="attempt_ended"):
    """By the supervisor: when no rank of an attempt is left."""

    code: Annotated[int, "exit code of the attempt"]
    reason: Sentence
    culprit: Annotated[int | None, "rank that failed first"]
    exits: Annotated[Mapping[str, int | None], "exit status by rank, null if it is not known"]
    seconds: Annotated[float | None, "seconds since the first rank ended"] = None
    left_at: Annotated[
        int | None, "step after which a program of the user's own left its loop before the last one"
    ] = None


@dataclass(frozen=True)
class ProgramAdvanced(LedgerEvent, name="program_advanced"):
    """By the supervisor: when no rank is left of a program that does not report what it saves, and
    it got further than before, by its step or by the time that it ran. Earlier failures and
    requeues no longer count."""

    step: Annotated[int | None, "furthest step that it reported, null if none"]
    seconds: Annotated[float, "seconds from its launch until the first rank ended"]


@dataclass(frozen=True)
class AttemptFailed(LedgerEvent, name="attempt_failed"):
    """By the supervisor: after an attempt that failed, before it decides what to do about it."""

    step: Annotated[int, "step that the first rank to fail was in"]
    committed: Annotated[int | None, "last step that was saved, null if there is none"]
    raised: Annotated[str, "what that rank raised, empty if it did not say"]
    node: Annotated[str, "node of that rank, if it is known"] = ""
    node_lost: Annotated[bool, "whether the node or the network is at fault, not the program"] = (
        False
    )
    code: Annotated[int, "exit code of the attempt"] = 1
    unstarted: Annotated[
        int | None, "exit status of a program that ended within seconds, before it said anything"
    ] = None


@dataclass(frozen=True)
class Restarting(LedgerEvent, name="restarting"):
    """By the supervisor: when it starts the ranks again after a failure."""

    reason: Sentence


@dataclass(frozen=True)
class RunGivenUp(LedgerEvent, name="gave_up"):
    """By the supervisor: when a restart cannot help. The file `GAVE_UP` says the same, if any step
    was made."""

    code: Annotated[int, "exit code of the run"]
    reason: Sentence
    see: Annotated[tuple[str, ...], "files that tell more"]
    advice: Annotated[str, "what to do"]
    rank: Annotated[int | None, "rank that failed first"] = None
    step: Annotated[int, "step that it was in"] = 0
    node: Annotated[str, "its node"] = ""
    raised: Annotated[str, "what it raised"] = ""


@dataclass(frozen=True)
class FaultsPlanned(LedgerEvent, name="faults_planned"):
    """By rank 0: when faults are to be injected, of any rank or attempt."""

    faults: Annotated[tuple[str, ...], "each as it was asked for"]


@dataclass(frozen=True)
class StartedAnew(LedgerEvent, name="started"):
    """By rank 0: when the run begins at step 0, because there is no checkpoint."""


@dataclass(frozen=True)
class Resumed(LedgerEvent, name="resumed"):
    """By rank 0: when the state of a checkpoint is loaded, to go on from it."""

    step: Step
    place: Place = ""


@dataclass(frozen=True)
class CheckpointCommitted(LedgerEvent, name="checkpoint_committed"):
    """By rank 0: when a checkpoint is durable, and `latest` names it."""

    step: Step
    bytes: Annotated[int, "size of its files in bytes"] = 0
    stage_seconds: Annotated[float | None, "seconds to copy the state"] = None
    write_seconds: Annotated[float | None, "seconds from then until all ranks wrote it"] = None
    commit_seconds: Annotated[float | None, "seconds from then until `latest` names it"] = None
    suspended: Annotated[bool, "whether Slurm suspended the job meanwhile"] = False
    place: Place = ""

    @classmethod
    def of(cls, step: int, size: int, took: SaveSeconds) -> Self:
        """The event for a save of `size` bytes; times are rounded to milliseconds."""
        stage, write, commit = (round(s, 3) for s in (took.stage, took.write, took.commit))
        return cls(step, size, stage, write, commit)

    @property
    def took(self) -> SaveSeconds | None:
        """How long the save took; None if unknown."""
        stage, write, commit = self.stage_seconds, self.write_seconds, self.commit_seconds
        if stage is None or write is None or commit is None:
            return None
        return SaveSeconds(stage, write, commit)


@dataclass(frozen=True)
class CheckpointFailed(LedgerEvent, name="checkpoint_failed"):
    """By rank 0: when a save failed. The checkpoint before it is intact."""

    step: Step
    reasons: Annotated[Mapping[str, str], "what went wrong, by rank"]


@dataclass(frozen=True)
class CheckpointDamaged(LedgerEvent, name="checkpoint_damaged"):
    """By rank 0: when a checkpoint does not verify, and is set aside."""

    step: Step
    kept_as: Annotated[str, "its folder's new name"]
    damage: Annotated[tuple[str, ...], "the first ten files, and what is wrong with each"]


@dataclass(frozen=True)
class StepSalvaged(LedgerEvent, name="step_salvaged"):
    """By the supervisor: when it has made a checkpoint of the step that the ranks held in
    memory."""

    step: Step
    saved: Annotated[int, "steps that would have had to be made again"]
    bytes: Annotated[int, "size of its files in bytes"]
    seconds: Annotated[float, "seconds that it took"]
    from_buddies: Annotated[int, "ranks whose part came from another node's memory"] = 0


@dataclass(frozen=True)
class SalvageDismissed(LedgerEvent, name="salvage_dismissed"):
    """By the supervisor: when no step could be made after such a checkpoint, and the one before it
    is used again."""

    step: Step
    back_to: Annotated[int, "step of the checkpoint before"]
    kept_as: Annotated[str, "its folder's new name"]


@dataclass(frozen=True)
class OwnProgramStands:
    """Where a user's own program is in a hang, by its stacks."""

    step: int
    places: Mapping[str, str]
    busy: int | None = None


@dataclass(frozen=True)
class HangFound(LedgerEvent, name="hang"):
    """By the supervisor: when no rank makes progress any more, and it ends the attempt."""

    reason: Sentence
    laggard: Annotated[int | None, "rank that the others wait for, null if unknown"]
    waiting: Annotated[Mapping[str, Sequence[int]], "ranks by what they wait for others in"]
    processes: Annotated[tuple[str, ...], "state of suspicious processes, from the system"]
    seconds: Annotated[float | None, "seconds since a rank last made progress"] = None
    evidence_seconds: Annotated[
        float | None, "how many of them were spent on collecting evidence"
    ] = None
    own_program: Annotated[
        OwnProgramStands | None,
        "of a user's own program: its last `step` that was done, the `places` in its code by rank, "
        "and the rank that may have been at work there (`busy`), if one was",
    ] = None


@dataclass(frozen=True)
class GpuFailed(LedgerEvent, name="gpu_failed"):
    """By the supervisor: when NVIDIA's driver reports an error of a GPU. One that needs a reset
    makes its node suspect."""

    node: Annotated[str, "its node"]
    gpu: Annotated[int, "its index there"]
    xid: Annotated[int, "NVIDIA's error number, 0 if a check found the error"]
    reason: Sentence


@dataclass(frozen=True)
class ConnectionsStalled(LedgerEvent, name="stalled"):
    """By any rank: in a hang, when connections of its node deliver nothing. For the supervisor,
    which does not put it into the ledger."""

    ends: Annotated[tuple[tuple[str, str], ...], "local and remote address of each connection"]


@dataclass(frozen=True)
class StandsAt(LedgerEvent, name="stands_at"):
    """By any rank: in a hang of a user's own program, to report where its main thread is. For the
    supervisor, which does not put it into the ledger."""

    line: Annotated[str, "the innermost line of the user's code, as FILE:LINE, empty if unknown"]
    collective: Annotated[str, "the collective that it waits in, empty if there is none"]


@dataclass(frozen=True)
class StragglerFound(LedgerEvent, name="straggler"):
    """By the supervisor: when the others begin to wait for one rank that is slower."""

    rank: RankNumber
    node: Annotated[str | None, "its node"]
    worked: Annotated[float, "seconds per step that it works"]
    usual: Annotated[float, "seconds per step that the others work"]
    lost: Annotated[float, "share (0 to 1) of each step that the others wait"]
    reason: Sentence


@dataclass(frozen=True)
class SlowDownFound(LedgerEvent, name="slow_down"):
    """By the supervisor: when steps begin to take longer than they used to."""

    step: Annotated[float, "seconds per step now"]
    usual: Annotated[float, "seconds per step before"]
    reason: Sentence


@dataclass(frozen=True)
class Recovered(LedgerEvent, name="recovered"):
    """By the supervisor: when a straggler or a slow run is as fast as before again."""

    of: Annotated[str, "name of the event that said how it began"]


@dataclass(frozen=True)
class MemoryLow(LedgerEvent, name="memory_low"):
    """By the supervisor: when a node has less memory left than `resilience.memory_reserve`."""

    rank: Annotated[int, "the largest rank there"]
    node: Annotated[str | None, "its node"]
    reason: Sentence


@dataclass(frozen=True)
class ResourceGrowth(LedgerEvent, name="growth"):
    """By the supervisor: when a rank's memory or open files grow so fast that they run out within a
    day."""

    rank: RankNumber
    node: Annotated[str | None, "its node"]
    reason: Sentence


@dataclass(frozen=True)
class StorageWaited(LedgerEvent, name="storage_waited"):
    """By the supervisor or any rank: when storage that failed works again. Waits within ten seconds
    of a recorded one are added to the next."""

    what: Annotated[str, "the file, and its last error"]
    seconds: Annotated[float, "seconds that were waited in all"]
    tries: Annotated[int, "how often it was tried"]
    rank: Annotated[int | None, "rank that has waited, null for the supervisor"] = None


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds that a phase takes, measured `count` times."""

    median: float
    spread: float
    count: int


@dataclass(frozen=True)
class PhaseDurationsLearned(LedgerEvent, name="phase_durations"):
    """By the supervisor: at the end of an attempt, and every ten minutes until then."""

    ranks: Annotated[int, "how many"]
    phases: Annotated[
        Mapping[str, PhaseTimes],
        "by phase the median in seconds, how far the 95th percentile is above it, and the count",
    ]


@dataclass(frozen=True)
class Requeued(LedgerEvent, name="requeued"):
    """By the supervisor, its keeper (for the watchdog), or a rank that outlives them: when it puts
    the job back into the queue."""

    step: Annotated[int | None, "last step that was saved, null if there is none"]
    job: Annotated[str, "Slurm's id of the job"]
    restarts: Annotated[int | None, "times that the job was requeued before"] = None
    nodes: Annotated[str | None, "the job's nodes, as Slurm abbreviates them"] = None
    reason: Sentence = ""
    preempted: Annotated[bool, "whether Slurm preempts the job"] = False
    by_rank: Annotated[int | None, "rank that does it, since the supervisor is gone"] = None
    without: Annotated[tuple[str, ...], "nodes that it is kept away from"] = ()
    starting: Annotated[bool, "whether the supervisor was killed as it started"] = False


@dataclass(frozen=True)
class JobHandedBack(LedgerEvent, name="handed_back"):
    """By the supervisor: when Slurm has taken the job back. Later attempts keep as much time free
    at the end of the job."""

    seconds: Annotated[float, "seconds since the last rank left, or was killed"]


@dataclass(frozen=True)
class NotRequeued(LedgerEvent, name="not_requeued"):
    """By the supervisor: when it does not put a run that could go on back into the queue, or Slurm
    refuses to."""

    step: Annotated[int | None, "last step that was saved, null if there is none"]
    reason: Sentence


@dataclass(frozen=True)
class Resubmitted(LedgerEvent, name="resubmitted"):
    """By the supervisor: after a refused requeue, when the run goes on as another job."""

    job: Annotated[str, "Slurm's id of the job that ends"]
    as_job: Annotated[str, "Slurm's id of the job that follows"]


@dataclass(frozen=True)
class NodeSuspected(LedgerEvent, name="suspect"):
    """By the supervisor or any rank: when there is evidence that a node is not fit for ranks."""

    node: Annotated[str, "its name"]
    reason: Sentence


@dataclass(frozen=True)
class NodesTakenBack(LedgerEvent, name="nodes_taken_back"):
    """By the supervisor: before it starts the ranks on nodes that were excluded, and are healthy
    again. Earlier evidence against them no longer counts."""

    nodes: Annotated[tuple[str, ...], "their names"]
    reason: Sentence


@dataclass(frozen=True)
class NodesJoined(LedgerEvent, name="nodes_joined"):
    """By the supervisor: before it starts ranks on nodes of other jobs that have joined the run
    (`kempner join`)."""

    nodes: Annotated[tuple[str, ...], "their names"]
    jobs: Annotated[tuple[str, ...], "Slurm's ids of their jobs, in the same order"]


@dataclass(frozen=True)
class NodesLeft(LedgerEvent, name="nodes_left"):
    """By the supervisor: before it starts the ranks without nodes of other jobs that had joined, or
    without nodes of its own that Slurm is about to take away."""

    nodes: Annotated[tuple[str, ...], "their names"]
    reason: Sentence
    lost: Annotated[bool, "whether they were gone without notice"] = False


@dataclass(frozen=True)
class NodesGivenBack(LedgerEvent, name="nodes_given_back"):
    """By the supervisor: when it has made the job smaller by nodes without ranks, which Slurm shows
    as not responding, down or leaving, and gives to no other job."""

    nodes: Annotated[tuple[str, ...], "their names"]
    reason: Sentence


@dataclass(frozen=True)
class StopRequested(LedgerEvent, name="stop_requested"):
    """By the supervisor: when it asks the ranks to stop, and again if less time is left or the
    reason is better known."""

    reason: Annotated[str, "why: a `StopReason`, such as `time_limit`"]
    sentence: Sentence
    seconds_left: Annotated[float, "seconds until the ranks are killed"]


@dataclass(frozen=True)
class Signalled(LedgerEvent, name="signalled"):
    """By rank 0: when a signal asks the ranks to stop before the supervisor does. In a preemption
    Slurm signals the ranks alone, and only the supervisor can ask how long it gives."""


@dataclass(frozen=True)
class Stopped(LedgerEvent, name="stopped"):
    """By rank 0: when the ranks leave before the last step, to go on from there later."""

    step: Annotated[int, "last step that was made"]
    reason: Annotated[str, "why: a `StopReason`, such as `time_limit`"]
    lost_steps: Annotated[int, "steps made since the last commit, to be made again"]
    sentence: Annotated[str, "more of the reason, for a person to read"] = ""


@dataclass(frozen=True)
class Completed(LedgerEvent, name="completed"):
    """By rank 0: when the last step is made and saved."""

    step: Annotated[int, "last step that was made"]


@dataclass(frozen=True)
class Left(LedgerEvent, name="left"):
    """By rank 0: when the program leaves its loop before the last step, of its own accord. The run
    is not complete: it goes on when the program is started again."""

    step: Annotated[int, "last step that was made"]
    steps: Annotated[int, "how many there are"]


@dataclass(frozen=True)
class Evaluated(LedgerEvent, name="evaluated"):
    """By rank 0: after an evaluation that was not cut short."""

    step: Step
    loss: Annotated[
        float | None, "nats per token (per pair of preferences), null without eval.dataset_path"
    ]
    seconds: Annotated[float, "seconds that it took"]
    sets: Annotated[Mapping[str, float] | None, "the same, by the names of eval.sets"] = None


@dataclass(frozen=True)
class StepSkipped(LedgerEvent, name="step_skipped"):
    """By rank 0: when a step's loss or gradient norm is not finite, so that it changed nothing."""

    step: Step
    reason: Sentence
    in_a_row: Annotated[int, "suspicious steps in a row"]


@dataclass(frozen=True)
class LossSpike(LedgerEvent, name="loss_spike"):
    """By rank 0: when a step's loss is far above those before."""

    step: Step
    reason: Sentence
    in_a_row: Annotated[int, "suspicious steps in a row"]


@dataclass(frozen=True)
class RolledBack(LedgerEvent, name="rolled_back"):
    """By rank 0: when the run has gone back to a good checkpoint."""

    at: Annotated[int, "step at which the run was found to have diverged"]
    to: Annotated[int, "step of the checkpoint"]
    start: Annotated[int, "first sample that is skipped from now on"]
    end: Annotated[int, "first sample after those"]


@dataclass(frozen=True)
class Diverged(LedgerEvent, name="diverged"):
    """By rank 0: when a rollback would not help, so that the run ends."""

    step: Annotated[int, "step at which the run was found to have diverged"]
    reason: Sentence


@dataclass(frozen=True)
class CorruptionFound(LedgerEvent, name="corruption_found"):
    """By rank 0: when ranks that computed the same part of a step differ, or a rank's memory has
    changed, before the attempt ends. The next one begins at the checkpoint."""

    step: Step
    part: Annotated[str, "what differed first"]
    ranks: Annotated[tuple[int, ...], "ranks that lied, or of which one did"]
    nodes: Annotated[tuple[str, ...], "their nodes"]
    sure: Annotated[bool, "whether it is known which"]
    to: Annotated[int | None, "step of the checkpoint, null if there is none yet"]
    reason: Sentence


@dataclass(frozen=True)
class CheckpointsCertified(LedgerEvent, name="checkpoints_certified"):
    """By rank 0: when a step that was computed again was equal, no memory has changed since, and
    there are checkpoints that were not certified before; or when it resumes from an earlier one."""

    step: Annotated[int, "step up to which checkpoints are certified"]


SUBJECTS: Mapping[str, tuple[type[LedgerEvent], ...]] = {
    "Attempts": (AttemptStarted, RankReady, AttemptEnded, ProgramAdvanced, AttemptFailed,
                 Restarting, RunGivenUp, FaultsPlanned),
    "Stops and the end of a run": (StopRequested, Signalled, Stopped, Completed, Left),
    "The Slurm job and its nodes": (Requeued, JobHandedBack, NotRequeued, Resubmitted,
                                    NodeSuspected, GpuFailed, NodesTakenBack, NodesJoined,
                                    NodesLeft, NodesGivenBack),
    "Hangs, slowness, memory, storage": (HangFound, ConnectionsStalled, StandsAt, StragglerFound,
                                         SlowDownFound, Recovered, MemoryLow, ResourceGrowth,
                                         StorageWaited, PhaseDurationsLearned),
    "Checkpoints": (StartedAnew, Resumed, CheckpointCommitted, CheckpointFailed, CheckpointDamaged,
                    StepSalvaged, SalvageDismissed),
    "Training": (Evaluated, StepSkipped, LossSpike, RolledBack, Diverged, CorruptionFound,
                 CheckpointsCertified),
}  # fmt: skip
"""All events, by subject: `parse_event` and docs/events.md are made from this list."""

_BY_NAME = {kind.name: kind for kinds in SUBJECTS.values() for kind in kinds}


def parse_event(name: object, fields: Mapping[str, Any]) -> LedgerEvent | None:
    """The event of this name; None if there is none, or the fields do not fit."""
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    try:
        return None if kind is None else kind.from_fields(fields)
    except ValueError:
        return None
