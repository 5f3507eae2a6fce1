"""Parses faults on demand: what fails, on which rank, and when.

    kill rank 3 at step 20
    hang rank 0 at step 5 in save
    slow rank 1 by 4 from step 10
    nan rank 1 at step 7 attempt 2
    crash rank 0 in load

`at` is once, `from` is that step and every later one. Without `attempt` the first attempt is meant,
so that a restart heals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kempner.config.errors import ConfigError


class FailPoint(StrEnum):
    """The points inside a save at which a fault can be asked for, as if each were a phase.

    They are passed by the threads of a save, with the step that is saved, once a save on each rank.
    """

    STAGE = "stage"
    """Before the copy of the state."""
    WRITE = "write"
    """After the rank's data, before its checksums."""
    COMMIT = "commit"
    """After all files of the rank, before rank 0 commits."""


_BEFORE_STEPS = ("start", "load")
_ANYWHERE = ("step", "start", "load", "eval", "save", *FailPoint)

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
}
"""What can be asked for, and in which phases; the first one is meant where none is named. The last
phases are the points inside a save, see `FailPoint`.

kill: SIGKILL to itself. stop: SIGSTOP to itself. hang: a loop in Python. spin: a loop in native
code that holds Python's lock, so that no thread of the process runs. strand: waits in a collective
that no other rank enters. crash: an exception. oom: asks for more memory than there is. hog: takes
the host's memory bit by bit until the kernel kills it. nan: what the rank's model returns, hence
loss and gradients. nan_gradients: one gradient of the rank. spike: what the rank's model returns
(its loss, or the logits of a model of your own) `by` times as large. slow: the step takes `by`
times as long. disk_full: the rank cannot write a file beyond 64 KiB until the save has failed.
"""

_SENTENCE = re.compile(
    r"(?P<kind>\w+) rank (?P<rank>\d+)(?: by (?P<factor>\d+(?:\.\d+)?))?"
    r"(?: (?P<when>at|from) step (?P<step>\d+))?(?: in (?P<phase>\w+))?"
    r"(?: attempt (?P<attempt>\d+))?"
)
_FORM = "KIND rank R [by F] at|from step N [in PHASE] [attempt K]"
_DEFAULT_FACTOR = 3.0


@dataclass(frozen=True)
class Fault:
    """One of them. `step` is None in the phases before the first step; `lasting` is `from`."""

    text: str
    kind: str
    rank: int
    phase: str
    step: int | None
    lasting: bool
    factor: float
    attempt: int

    def covers(self, phase: str, step: int | None) -> bool:
        """Whether the fault is due in this phase of this step."""
        if phase != self.phase or step is None or self.step is None:
            return phase == self.phase
        return step >= self.step if self.lasting else step == self.step


def refuse_absent_ranks(texts: Iterable[str], world: int) -> None:
    """Raise `ConfigError` for a fault of a rank that a world of this size has not.

    The faults were parsed before, so each is one.
    """
    for fault in parse_faults(texts):
        if fault.rank >= world:
            raise ConfigError(
                f'resilience.faults: "{fault.text}": there is no rank {fault.rank}; '
                f"the {world} rank{'s are' if world > 1 else ' is'} numbered from 0"
            )


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    """Read faults. Raises `ValueError` with a sentence that quotes the first one that is none."""
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
    if found["factor"] and kind not in ("slow", "spike"):
        raise ValueError(f'"{text}": `by` has no effect on {kind}; remove it')
    return Fault(
        text=text,
        kind=kind,
        rank=int(found["rank"]),
        phase=phase,
        step=None if step is None else int(step),
        lasting=found["when"] == "from",
        factor=float(found["factor"] or _DEFAULT_FACTOR),
        attempt=int(found["attempt"] or 1),
    )
