"""How a run heals itself: what is a hang, who is slow, and when the loss has left the rails."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kempner.config.fault_spec import parse_faults
from kempner.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class HangTimeouts(Section):
    """Seconds without a move that are always a hang, where a phase needs a limit of its own."""

    start: PositiveFloat | None = None
    """From the launch until a rank looks for the others; resilience.hang_timeout_max when left
    out."""
    rendezvous: PositiveFloat | None = None
    """Until all ranks have met; resilience.hang_timeout_max when left out."""
    load: PositiveFloat | None = None
    """Loading a checkpoint; resilience.hang_timeout_max when left out."""
    compile: PositiveFloat | None = None
    """The first step of an attempt; resilience.hang_timeout_max when left out."""
    step: PositiveFloat | None = None
    """Any other step; resilience.hang_timeout_max when left out."""
    eval: PositiveFloat | None = None
    """One evaluation; resilience.hang_timeout_max when left out."""
    save: PositiveFloat | None = None
    """A save, as far as training waits for it; resilience.hang_timeout_max when left out."""
    exit: PositiveFloat | None = None
    """The ranks' last wait for each other; resilience.hang_timeout_max when left out."""

    def of(self, phase: str) -> float | None:
        """A phase's own ceiling in seconds; None when left out."""
        ceiling: float | None = getattr(self, phase)
        return ceiling


class ResilienceSection(Section):
    """What is a hang, and what to do when the loss leaves the rails; and faults on demand, to
    rehearse all of it."""

    hang_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """No rank has moved for this many times what the phase usually takes: then it is a hang. What
    is usual is learned from the run, as the 95th percentile; of steps, of the time between two."""
    hang_timeout_min: PositiveFloat = 300.0
    """Seconds without a move that are never a hang."""
    hang_timeout_max: PositiveFloat = 1800.0
    """Seconds without a move that are always a hang; the only limit for a phase of which nothing
    has been learned yet."""
    hang_timeout_max_of: HangTimeouts = HangTimeouts()
    """Other ceilings for single phases."""

    straggler_share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """A rank is a straggler if its own work per step takes longer than that of the others, by their
    median, by so large a share of the step: that much of the run's time is lost to it."""
    straggler_is_suspect: bool = False
    """Treat the node of a straggler as suspect when ranks are started again."""
    slowdown_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.5
    """A step takes so many times as long as it used to: then the run has become slow."""

    memory_reserve: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """A node that has less than this share of its memory left, or of what the job may have there,
    is named, with its largest rank."""

    spike_window: Annotated[int, Field(ge=16)] = 128
    """Losses of the last sound steps that a new loss is compared with."""
    spike_threshold: PositiveFloat = 10.0
    """A loss is a spike if it is above their median by this many times their spread (1.4826 times
    the median absolute deviation, but at least 1% of the median)."""
    rollback_after: PositiveInt = 5
    """Steps in a row with a spike, or without a finite loss and gradient, after which the run goes
    back to a checkpoint and leaves out the data since."""
    max_rollbacks: NonNegativeInt = 3
    """Rollbacks without a commit beyond the trouble before the run ends with exit code 78."""
    health_check: bool = True
    """Before each attempt look at every node: memory, disk, /dev/shm, open files, clock, network
    interface, shared folders, and a small computation with a known result on each device."""
    suspect_for: PositiveFloat = 86_400.0
    """Seconds for which a node that failed a check, or made attempts fail, is left out where others
    can do (supervise.spare_nodes, supervise.min_nodes); else it is used with a warning."""
    faults: list[str] = []  # noqa: RUF012 - pydantic copies it
    """Faults to happen on purpose, as in "kill rank 3 at step 20"; KEMPNER_FAULTS takes some, too,
    separated by semicolons."""

    @model_validator(mode="after")
    def _names_faults(self) -> Self:
        parse_faults(self.faults)
        return self
