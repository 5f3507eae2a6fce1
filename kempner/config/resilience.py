"""Configuration of fault tolerance: hangs, stragglers, memory, divergence, health checks."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kempner.config.fault_spec import parse_faults
from kempner.config.section import (
    Key,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
)


class HangTimeouts(Section):
    """Maximum hang timeout per phase, in seconds; resilience.hang_timeout_max by default."""

    start: Annotated[PositiveFloat | None, Key("seconds", 600.0)] = None
    """From the launch until a rank looks for the others."""
    rendezvous: Annotated[PositiveFloat | None, Key("seconds", 600.0)] = None
    """Until all ranks have met."""
    load: Annotated[PositiveFloat | None, Key("seconds", 3600.0)] = None
    """Loading a checkpoint."""
    compile: Annotated[PositiveFloat | None, Key("seconds", 3600.0)] = None
    """The first step of an attempt."""
    step: Annotated[PositiveFloat | None, Key("seconds", 600.0)] = None
    """Any other step."""
    eval: Annotated[PositiveFloat | None, Key("seconds", 1800.0)] = None
    """One evaluation."""
    save: Annotated[PositiveFloat | None, Key("seconds", 1200.0)] = None
    """A save, as far as training waits for it."""
    exit: Annotated[PositiveFloat | None, Key("seconds", 300.0)] = None
    """The last barrier, before the ranks exit."""

    def of(self, phase: str) -> float | None:
        """The maximum timeout of a phase in seconds; None if not set."""
        ceiling: float | None = getattr(self, phase)
        return ceiling


class ResilienceSection(Section):
    """Detection of hangs, stragglers and divergence, health checks, and faults on demand to
    rehearse all of it."""

    hang_factor: Annotated[float, Field(gt=1, allow_inf_nan=False), Key("times", 20.0)] = 10.0
    """It is a hang if no rank makes progress for this many times the phase's usual duration, which
    is learned from the run (95th percentile; of steps, of the time between two)."""
    hang_timeout_min: Annotated[PositiveFloat, Key("seconds", 120.0)] = 300.0
    """Smallest hang timeout in seconds: shorter standstills are never a hang."""
    hang_timeout_max: Annotated[PositiveFloat, Key("seconds", 3600.0)] = 1800.0
    """Largest hang timeout in seconds: longer standstills are always a hang. The only limit for a
    phase whose duration is not known yet."""
    hang_timeout_max_of: HangTimeouts = HangTimeouts()
    """Largest hang timeouts of single phases."""

    patience: Annotated[NonNegativeFloat, Key("seconds", 1800.0)] = 600.0
    """Seconds for which storage may fail (I/O errors, a full disk, a folder that is gone for a
    while) before a rank gives up and exits; it is tried again until then. A run that is in progress
    trains on for as long while no checkpoint can be written. 0: no second try."""

    straggler_share: Annotated[float, Field(gt=0, lt=1), Key("share of a step", 0.1)] = 0.15
    """A rank is a straggler if its work per step exceeds the median of the others by this share of
    the step, since that share of the run's time is lost."""
    straggler_is_suspect: bool = False
    """Treat the node of a straggler as suspect at the next restart."""
    slowdown_factor: Annotated[float, Field(gt=1, allow_inf_nan=False), Key("times", 2.0)] = 1.5
    """Report a slow-down when a step takes this many times as long as it used to."""

    memory_reserve: Annotated[float, Field(ge=0, lt=1), Key("share of the memory", 0.1)] = 0.05
    """Report a node, with its largest rank, that has less than this share left of its memory or of
    the job's memory limit there."""

    spike_window: Annotated[int, Field(ge=16), Key("losses", 256)] = 128
    """Number of normal losses that a new loss is compared with."""
    spike_threshold: Annotated[PositiveFloat, Key("times", 20.0)] = 10.0
    """A loss is a spike if it is above their median by this many times their spread (1.4826 times
    the median absolute deviation, but at least 1% of the median)."""
    rollback_after: Annotated[PositiveInt, Key("steps", 10)] = 5
    """Steps in a row with a spike or a non-finite loss or gradient after which the run rolls back
    to a checkpoint and skips the data since then."""
    max_rollbacks: Annotated[NonNegativeInt, Key("rollbacks", 1)] = 3
    """Rollbacks in a row without a later commit before the run ends with exit code 78."""
    health_check: bool = True
    """Check every node before each attempt: memory, disk, /dev/shm, open files, clock, network
    interface, shared folders, and a small computation with a known result on each device."""
    suspect_for: Annotated[PositiveFloat, Key("seconds", 3600.0)] = 86_400.0
    """Seconds for which a node that failed a check or made attempts fail is excluded if possible
    (supervise.spare_nodes, supervise.min_nodes); otherwise it is used with a warning."""
    suspects_dir: Annotated[PathText | None, Key(example="/shared/group/suspect-nodes")] = None
    """Folder in which the runs of a group tell each other of suspect nodes, on storage that all of
    them see. Only those are told of that there is more against than that their ranks failed first.
    Off by default."""
    faults: Annotated[
        list[str], Key(example=["kill rank 3 at step 20"], form="list of faults, in words")
    ] = []  # noqa: RUF012 - pydantic copies it
    """Faults to inject, as in "kill rank 3 at step 20". The variable KEMPNER_FAULTS adds more,
    separated by semicolons."""

    @model_validator(mode="after")
    def _names_faults(self) -> Self:
        parse_faults(self.faults)
        return self
