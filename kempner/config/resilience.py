"""Configuration of fault tolerance: hangs, stragglers, memory, divergence, health checks. Faults
on demand: what fails, on which rank, and when.

    kill rank 3 at step 20
    hang rank 0 at step 5 in save
    slow rank 1 by 4 from step 10
    nan rank 1 at step 7 attempt 2
    crash rank 0 in load
    flip on node7 from step 20 in activations

`at` is once, `from` is that step and every later one. Without `attempt` a fault of a rank is in the
first attempt, so that a restart heals, and one on a node in all of them: it has each rank there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from kempner.config.errors import ConfigError
from kempner.config.section import (
    Key,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
)


class FailPoint(StrEnum):
    """Points in a save at which a fault can be injected, named like phases; each rank passes them
    once per save."""

    STAGE = "stage"
    """Before the copy of the state."""
    WRITE = "write"
    """After the rank's data, before its checksums."""
    COMMIT = "commit"
    """After all files of the rank, before rank 0 commits."""


_BEFORE_STEPS = ("start", "load")
_ANYWHERE = ("step", "start", "load", "eval", "save", *FailPoint)

FLIPPED = ("weights", "moments", "inputs", "activations", "gradients")
"""Where a bit can flip."""

KINDS = {
    "kill": _ANYWHERE,
    "stop": _ANYWHERE,
    "hang": _ANYWHERE,
    "spin": _ANYWHERE,
    "strand": ("step", "load", "eval", "save"),
    "crash": _ANYWHERE,
    "oom": _ANYWHERE,
    "hog": _ANYWHERE,
    "nan": ("step",),
    "nan_gradients": ("step",),
    "spike": ("step",),
    "slow": ("step",),
    "disk_full": ("save",),
    "flip": FLIPPED,
}
"""The kinds of faults, and the phases in which each is possible; the first is the default. The last
phases are the points in a save, see `FailPoint`.

kill: SIGKILL to itself. stop: SIGSTOP to itself. hang: a loop in Python. spin: a loop in native
code that holds the GIL, so that no thread of the process runs. strand: waits in a collective that
no other rank enters. crash: an exception. oom: asks for more memory than there is. hog: takes the
host's memory bit by bit until the kernel kills it. nan: the output of the rank's model becomes NaN,
and so loss and gradients. nan_gradients: one gradient of the rank becomes NaN. spike: the output of
the rank's model (its loss, or the logits of a model of your own) is `by` times as large. slow: the
step takes `by` times as long. disk_full: the rank cannot write a file beyond 64 KiB until the save
has failed. flip: bit number `by` of one element flips, in the memory of weights or moments, or
while the rank computes: of its inputs, the activations of its first block, or their gradients.
"""

_SENTENCE = re.compile(
    r"(?P<kind>\w+) (?:rank (?P<rank>\d+)|on (?P<node>[\w.-]+))(?: by (?P<factor>\d+(?:\.\d+)?))?"
    r"(?: (?P<when>at|from) step (?P<step>\d+))?(?: in (?P<phase>\w+))?"
    r"(?: attempt (?P<attempt>\d+))?"
)
_FORM = "KIND rank R|on NODE [by F] at|from step N [in PHASE] [attempt K]"
_DEFAULT_FACTOR = 3.0


@dataclass(frozen=True)
class Fault:
    """A fault of a `rank`, or of each rank on a `node`. `step` is None in phases before the first
    step; `lasting` means `from`, not `at`; `attempt` is None if every one is meant."""

    text: str
    kind: str
    rank: int | None
    phase: str
    step: int | None
    lasting: bool
    factor: float
    attempt: int | None
    node: str | None = None

    def is_of(self, rank: int, node: str, attempt: int) -> bool:
        if self.attempt not in (None, attempt):
            return False
        return rank == self.rank if self.node is None else self.node == node

    def covers(self, phase: str, step: int | None) -> bool:
        if phase != self.phase or step is None or self.step is None:
            return phase == self.phase
        return step >= self.step if self.lasting else step == self.step


def refuse_absent_ranks(texts: Iterable[str], world: int) -> None:
    """Raise `ConfigError` for a fault (valid text) on a rank that does not exist in this world."""
    for fault in parse_faults(texts):
        if fault.rank is not None and fault.rank >= world:
            raise ConfigError(
                f'resilience.faults: "{fault.text}": there is no rank {fault.rank}; '
                f"the {world} rank{'s are' if world > 1 else ' is'} numbered from 0"
            )


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    """Parse faults. Raises `ValueError` with a sentence that quotes the first invalid one."""
    return tuple(_parse(" ".join(text.split())) for text in texts)


def _parse(text: str) -> Fault:
    found = _SENTENCE.fullmatch(text)
    if found is None:
        raise ValueError(f'"{text}" is not a fault; write {_FORM}')
    kind, step = found["kind"], found["step"]
    if kind not in KINDS:
        raise ValueError(f'"{text}" is not a fault; the kinds are {", ".join(KINDS)}')
    phase = found["phase"] or KINDS[kind][0]
    if phase not in KINDS[kind]:
        raise ValueError(f'"{text}": {kind} can happen in {", ".join(KINDS[kind])} only')
    if (step is None) != (phase in _BEFORE_STEPS):
        remedy = "remove the step" if step else "name one, as in `at step 20`"
        raise ValueError(
            f'"{text}": {phase} {"comes before any" if step else "needs a"} step; {remedy}'
        )
    if found["factor"] and kind not in ("slow", "spike", "flip"):
        raise ValueError(f'"{text}": `by` has no effect on {kind}; remove it')
    if kind == "slow" and float(found["factor"] or _DEFAULT_FACTOR) < 1:
        raise ValueError(f'"{text}": a step cannot take less time; `by` must be at least 1')
    return Fault(
        text=text,
        kind=kind,
        rank=None if found["node"] else int(found["rank"]),
        phase=phase,
        step=None if step is None else int(step),
        lasting=found["when"] == "from",
        factor=float(found["factor"] or _DEFAULT_FACTOR),
        attempt=None if found["node"] and not found["attempt"] else int(found["attempt"] or 1),
        node=found["node"],
    )


class HangTimeouts(Section):
    """Maximum hang timeout per phase, in seconds; resilience.hang_timeout_max by default."""

    start: Annotated[PositiveFloat | None, Key("seconds", 600.0)] = None
    """From the launch until a rank begins to connect to the others."""
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
    """A save, while training waits for it."""
    exit: Annotated[PositiveFloat | None, Key("seconds", 300.0)] = None
    """The last barrier, before the ranks exit."""


class ResilienceSection(Section):
    """Detection of hangs, stragglers and divergence, health checks, and faults on demand to
    rehearse all of it."""

    hang_factor: Annotated[float, Field(gt=1, allow_inf_nan=False), Key("times", 20.0)] = 10.0
    """It is a hang if no rank makes progress for this many times the phase's usual duration, which
    is measured in the run (95th percentile; for steps, of the time between two)."""
    hang_timeout_min: Annotated[PositiveFloat, Key("seconds", 120.0)] = 300.0
    """Smallest hang timeout in seconds: shorter standstills are never a hang."""
    hang_timeout_max: Annotated[PositiveFloat, Key("seconds", 3600.0)] = 1800.0
    """Largest hang timeout in seconds: longer standstills are always a hang. The only limit for a
    phase whose duration is not known yet."""
    hang_timeout_max_of: HangTimeouts = HangTimeouts()
    """Largest hang timeouts of single phases."""
    hang_timeout_at_work: Annotated[PositiveFloat, Key("seconds", 43_200.0)] = 21_600.0
    """Largest hang timeout in seconds of a program of your own while one of its ranks is at work
    between two steps or after the last one: its stack changes, or it computes or reads in native
    code. The log says so every five minutes. Ranks of a program that does not report its steps may
    be idle for as long, if they poll now and then."""

    patience: Annotated[NonNegativeFloat, Key("seconds", 1800.0)] = 600.0
    """Seconds for which storage may fail (I/O errors, a full disk, a folder that is gone for a
    while) before a rank gives up and exits; it retries until then. A run in progress keeps training
    for as long while no checkpoint can be written. 0: no retry."""

    straggler_share: Annotated[float, Field(gt=0, lt=1), Key("share of a step", 0.1)] = 0.15
    """A rank is a straggler if its work per step exceeds the median of the others by this share of
    the step; that share of the run's time is lost."""
    straggler_is_suspect: bool = False
    """Treat the node of a straggler as suspect at the next restart."""
    slowdown_factor: Annotated[float, Field(gt=1, allow_inf_nan=False), Key("times", 2.0)] = 1.5
    """Report a slow-down when a step takes this many times its earlier duration."""

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
    """Folder, on shared storage, through which the runs of a group share suspect nodes. A node is
    shared only if there is more evidence against it than that its ranks failed first. Off by
    default."""
    faults: Annotated[
        list[str], Key(example=["kill rank 3 at step 20"], form="list of faults, in words")
    ] = []  # noqa: RUF012 - pydantic copies it
    """Faults to inject, as in "kill rank 3 at step 20". The variable KEMPNER_FAULTS adds more,
    separated by semicolons."""

    @model_validator(mode="after")
    def _names_faults(self) -> Self:
        parse_faults(self.faults)
        return self
