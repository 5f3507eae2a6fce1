"""All events, by subject: the one list from which a name leads to its event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kempner.run.record import events
from kempner.run.record.events import LedgerEvent

SUBJECTS: Mapping[str, tuple[type[LedgerEvent], ...]] = {
    "Attempts": (
        events.AttemptStarted,
        events.RankReady,
        events.AttemptEnded,
        events.ProgramAdvanced,
        events.AttemptFailed,
        events.Restarting,
        events.RunGivenUp,
        events.FaultsPlanned,
    ),
    "Stops and the end of a run": (
        events.StopRequested,
        events.Signalled,
        events.Stopped,
        events.Completed,
        events.Left,
    ),
    "The Slurm job and its nodes": (
        events.Requeued,
        events.JobHandedBack,
        events.NotRequeued,
        events.Resubmitted,
        events.NodeSuspected,
        events.NodesTakenBack,
        events.NodesJoined,
        events.NodesLeft,
    ),
    "Hangs, slowness, memory, storage": (
        events.HangFound,
        events.ConnectionsStalled,
        events.StandsAt,
        events.StragglerFound,
        events.SlowDownFound,
        events.Recovered,
        events.MemoryLow,
        events.ResourceGrowth,
        events.StorageWaited,
        events.PhaseDurationsLearned,
    ),
    "Checkpoints": (
        events.StartedAnew,
        events.Resumed,
        events.CheckpointCommitted,
        events.CheckpointFailed,
        events.CheckpointDamaged,
        events.StepSalvaged,
        events.SalvageDismissed,
    ),
    "Training": (
        events.Evaluated,
        events.StepSkipped,
        events.LossSpike,
        events.RolledBack,
        events.Diverged,
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
