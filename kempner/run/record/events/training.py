"""Events of the training: evaluations, suspicious losses, rollbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from kempner.run.record.events.base import LedgerEvent, Sentence, Step


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
