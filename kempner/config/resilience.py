"""Configuration of fault tolerance: hangs, stragglers, memory, divergence, health checks."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kempner.config.fault_spec import parse_faults
from kempner.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
)


class HangTimeouts(Section):
    """Maximum hang timeout per phase, in seconds; resilience.hang_timeout_max by default."""

    start: PositiveFloat | None = None
    """From the launch until a rank looks for the others."""
    rendezvous: PositiveFloat | None = None
    """Until all ranks have met."""
    load: PositiveFloat | None = None
    """Loading a checkpoint."""
    compile: PositiveFloat | None = None
    """The first step of an attempt."""
    step: PositiveFloat | None = None
    """Any other step."""
    eval: PositiveFloat | None = None
    """One evaluation."""
    save: PositiveFloat | None = None
    """A save, as far as training waits for it."""
    exit: PositiveFloat | None = None
    """The last barrier, before the ranks exit."""

    def of(self, phase: str) -> float | None:
        """The maximum timeout of a phase in seconds; None if not set."""
        ceiling: float | None = getattr(self, phase)
        return ceiling


class ResilienceSection(Section):
    """Detection of hangs, stragglers and divergence, health checks, and faults on demand to
    rehearse all of it."""

    hang_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """It is a hang if no rank makes progress for this many times the phase's usual duration, which
    is learned from the run (95th percentile; of steps, of the time between two)."""
    hang_timeout_min: PositiveFloat = 300.0
    """Smallest hang timeout in seconds: shorter standstills are never a hang."""
    hang_timeout_max: PositiveFloat = 1800.0
    """Largest hang timeout in seconds: longer standstills are always a hang. The only limit for a
    phase whose duration is not known yet."""
    hang_timeout_max_of: HangTimeouts = HangTimeouts()
    """Largest hang timeouts of single phases."""

    patience: NonNegativeFloat = 600.0
    """Seconds for which storage may fail (I/O errors, a full disk, a folder that is gone for a
    while) before a rank gives up and exits; it is tried again until then. A run that is in progress
    trains on for as long while no checkpoint can be written. 0: no second try."""

    straggler_share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """A rank is a straggler if its work per step exceeds the median of the others by this share of
    the step, since that share of the run's time is lost."""
    straggler_is_suspect: bool = False
    """Treat the node of a straggler as suspect at the next restart."""
    slowdown_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.5
    """Report a slow-down when a step takes this many times as long as it used to."""

    memory_reserve: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Report a node, with its largest rank, that has less than this share left of its memory or of
    the job's memory limit there."""

    spike_window: Annotated[int, Field(ge=16)] = 128
    """Number of normal losses that a new loss is compared with."""
    spike_threshold: PositiveFloat = 10.0
    """A loss is a spike if it is above their median by this many times their spread (1.4826 times
    the median absolute deviation, but at least 1% of the median)."""
    rollback_after: PositiveInt = 5
    """Steps in a row with a spike or a non-finite loss or gradient after which the run rolls back
    to a checkpoint and skips the data since then."""
    max_rollbacks: NonNegativeInt = 3
    """Rollbacks in a row without a later commit before the run ends with exit code 78."""
    health_check: bool = True
    """Check every node before each attempt: memory, disk, /dev/shm, open files, clock, network
    interface, shared folders, and a small computation with a known result on each device."""
    suspect_for: PositiveFloat = 86_400.0
    """Seconds for which a node that failed a check or made attempts fail is excluded if possible
    (supervise.spare_nodes, supervise.min_nodes); otherwise it is used with a warning."""
    suspects_dir: PathText | None = None
    """Folder in which the runs of a group tell each other of suspect nodes, on storage that all of
    them see. Only those are told of that there is more against than that their ranks failed first.
    Off by default."""
    faults: list[str] = []  # noqa: RUF012 - pydantic copies it
    """Faults to inject, as in "kill rank 3 at step 20". The variable KEMPNER_FAULTS adds more,
    separated by semicolons."""

    @model_validator(mode="after")
    def _names_faults(self) -> Self:
        parse_faults(self.faults)
        return self
