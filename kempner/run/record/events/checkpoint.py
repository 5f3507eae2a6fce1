"""Events of the state on disk: where the run goes on from, and what was saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from kempner.run.record.events.base import LedgerEvent, Place, Step
from kempner.run.record.save_times import SaveSeconds


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
