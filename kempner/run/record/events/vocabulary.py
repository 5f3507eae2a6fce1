"""All events, by subject: the one list from which a name leads to its event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kempner.run.record.events import attempt, checkpoint, health, job, stop, training
from kempner.run.record.events.base import LedgerEvent

SUBJECTS: Mapping[str, tuple[type[LedgerEvent], ...]] = {
    "Attempts": (
        attempt.AttemptStarted,
        attempt.RankReady,
        attempt.AttemptEnded,
        attempt.ProgramAdvanced,
        attempt.AttemptFailed,
        attempt.Restarting,
        attempt.RunGivenUp,
        attempt.FaultsPlanned,
    ),
    "Stops and the end of a run": (
        stop.StopRequested,
        stop.Signalled,
        stop.Stopped,
        stop.Completed,
        stop.Left,
    ),
    "The Slurm job and its nodes": (
        job.Requeued,
        job.JobHandedBack,
        job.NotRequeued,
        job.Resubmitted,
        job.NodeSuspected,
        job.NodesTakenBack,
        job.NodesJoined,
        job.NodesLeft,
    ),
    "Hangs, slowness, memory, storage": (
        health.HangFound,
        health.ConnectionsStalled,
        health.StandsAt,
        health.StragglerFound,
        health.SlowDownFound,
        health.Recovered,
        health.MemoryLow,
        health.ResourceGrowth,
        health.StorageWaited,
        health.PhaseDurationsLearned,
    ),
    "Checkpoints": (
        checkpoint.StartedAnew,
        checkpoint.Resumed,
        checkpoint.CheckpointCommitted,
        checkpoint.CheckpointFailed,
        checkpoint.CheckpointDamaged,
        checkpoint.StepSalvaged,
        checkpoint.SalvageDismissed,
    ),
    "Training": (
        training.Evaluated,
        training.StepSkipped,
        training.LossSpike,
        training.RolledBack,
        training.Diverged,
    ),
}

_BY_NAME = {kind.name: kind for kinds in SUBJECTS.values() for kind in kinds}


def parse_event(name: object, fields: Mapping[str, Any]) -> LedgerEvent | None:
    """The event of this name; None if there is no such, or the fields are not those that it has."""
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    try:
        return None if kind is None else kind.from_fields(fields)
    except ValueError:
        return None
