"""The matrix of storage faults: what x where x when x how long; which cells there can be, and which
of them are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from faulty_storage.rules import EMPTY, HANG, READS, WRITES

RUN = "a/runs/run"
"""The run's directory, below the mount."""

BROKEN = ("EIO", "ESTALE", "ETIMEDOUT")
FULL = ("ENOSPC", "EDQUOT")
REFUSED = ("EMFILE", "EACCES")
WHATS = (*BROKEN, *FULL, *REFUSED, HANG, EMPTY)

START, LOAD, STEP, SAVE, STOP, REQUEUE = "start", "load", "step", "save", "stop", "requeue"
WHENS = (START, LOAD, STEP, SAVE, STOP, REQUEUE)
"""From the first launch; from a resume's first look into a checkpoint; from a step; from the
beginning of a save; from a SIGTERM; from the launch after one."""

SHORT, LONG, CHANCE = "10 s", "90 s", "p"
HOWS = (SHORT, LONG, CHANCE)
HOW = 3
"""The place of how among a cell's values."""

FEW = 20
"""Cells in `make check`."""

_OPERATORS_MISTAKES = ((EMPTY, START), ("EACCES", START))

_BY_PATH = ("open", "create", "mkdir", "rename", "unlink", "symlink", "truncate", "readdir")
_OF_WHAT = {
    **dict.fromkeys(BROKEN, (*READS, *WRITES)),
    **dict.fromkeys(FULL, ("create", "write", "fsync", "flush", "mkdir", "rename", "symlink")),
    "EMFILE": ("open", "create", "readdir"),
    "EACCES": _BY_PATH,
    HANG: (*READS, *WRITES),
    EMPTY: (*_BY_PATH, "stat", "readlink"),
}
"""The operations that a fault is an answer to."""


@dataclass(frozen=True)
class Place:
    """A part of what is stored: its paths and operations, and the faults and moments it knows.

    `opened` is when it is opened: what is open already cannot be refused, or be absent. What was
    never there, or never allowed, is no fault that passes: a first launch refuses it, and rightly.
    """

    paths: tuple[str, ...]
    operations: tuple[str, ...] = (*READS, *WRITES)
    whats: tuple[str, ...] = WHATS
    whens: tuple[str, ...] = WHENS
    opened: tuple[str, ...] = WHENS
    never: tuple[tuple[str, str], ...] = ()

    def knows(self, what: str, when: str) -> bool:
        moments = self.opened if what in (*REFUSED, EMPTY) else WHENS
        listed = what in self.whats and when in self.whens and when in moments
        return listed and (what, when) not in (*self.never, *_OPERATORS_MISTAKES)


def _in_run(*names: str) -> tuple[str, ...]:
    return tuple(f"{RUN}/{name}" for name in names)


_NO_PATHS = (*BROKEN, *FULL, HANG)

WHERES = {
    "tokens": Place(("tokens/", "tokens/*"), READS, (*BROKEN, *REFUSED, HANG, EMPTY), (*WHENS,)),
    "checkpoint read": Place(
        _in_run("checkpoints/", "checkpoints/latest", "checkpoints/step-*"),
        READS,
        (*BROKEN, *REFUSED, HANG, EMPTY),
        (START, LOAD, SAVE, STOP, REQUEUE),
    ),
    "checkpoint write": Place(
        _in_run("checkpoints/", "checkpoints/*"),
        WRITES,
        (*BROKEN, *FULL, *REFUSED, HANG, EMPTY),
        (START, LOAD, SAVE, STOP, REQUEUE),
        # The folder is made, nothing opened; in a load a marker is removed, nothing written.
        never=(("EMFILE", START), *((what, LOAD) for what in ("EMFILE", *FULL))),
    ),
    "ledger": Place(_in_run("ledger.jsonl"), whens=(START, LOAD, SAVE, STOP, REQUEUE)),
    "lease": Place(_in_run("supervisors/", "supervisors/*")),
    "control files": Place(
        _in_run("attempts/", "attempts/*CURRENT*", "attempts/?", "attempts/*/*ranks.json*")
        + _in_run("attempts/*/*.messages", "attempts/*/health*")
    ),
    "logs": Place(_in_run("attempts/*/*.jsonl", "attempts/*/*.out"), opened=(START, REQUEUE)),
    "metrics": Place(_in_run("metrics.jsonl"), whens=(STEP, SAVE, REQUEUE)),
    "stdout": Place(("a/stdout-*",), ("write",), _NO_PATHS, (LOAD, SAVE, STOP, REQUEUE)),
    "stderr": Place(("a/stderr-*",), ("write",), _NO_PATHS),
}


@dataclass(frozen=True)
class Cell:
    """One fault of one run."""

    what: str
    where: str
    when: str
    how: str

    @property
    def operations(self) -> tuple[str, ...]:
        """What meets the fault."""
        own = WHERES[self.where].operations
        return tuple(name for name in _OF_WHAT[self.what] if name in own)

    def __str__(self) -> str:
        return f"{self.what}, {self.where}, {self.when}, {self.how}"


def possible(cell: Cell) -> bool:
    """Whether there can be this fault, there, then."""
    place = WHERES[cell.where]
    return place.knows(cell.what, cell.when) and bool(cell.operations)


def cells() -> list[Cell]:
    """Every cell that there can be."""
    every = (Cell(*one) for one in product(WHATS, WHERES, WHENS, HOWS))
    return [cell for cell in every if possible(cell)]


Tuple = tuple[tuple[int, str], ...]
Demands = Callable[[Cell], frozenset[Tuple]]
"""What a cell is an example of."""


def covering(candidates: Sequence[Cell], demands: Demands) -> list[Cell]:
    """Few cells that have, together, an example of all that any candidate is one of.

    Greedy: always the one with the most that is new; of several, the one with the most pairs of
    values that are new; of these, the first.
    """
    examples = {cell: (demands(cell), tuples_of(values(cell), 2)) for cell in candidates}
    missing = frozenset().union(*(demanded for demanded, _ in examples.values()))
    chosen: list[Cell] = []
    seen: set[Tuple] = set()

    def gain(cell: Cell) -> tuple[int, int]:
        demanded, pairs = examples[cell]
        return len(demanded & missing), len(pairs - seen)

    while missing:
        chosen.append(max(candidates, key=gain))
        demanded, pairs = examples[chosen[-1]]
        missing -= demanded
        seen |= pairs
    return chosen


def tuples_of(values: Iterable[str], size: int) -> frozenset[Tuple]:
    """All tuples of `size` of a cell's values, each with its place."""
    return frozenset(combinations(enumerate(values), size))


def values(cell: Cell) -> tuple[str, ...]:
    return cell.what, cell.where, cell.when, cell.how


_KIND_OF_WHAT = {
    **dict.fromkeys(BROKEN, "broken"),
    **dict.fromkeys((*FULL, *REFUSED), "refused"),
    **dict.fromkeys((HANG, EMPTY), "gone"),
}
_KIND_OF_WHERE = {
    **dict.fromkeys(("tokens", "checkpoint read", "checkpoint write"), "data"),
    **dict.fromkeys(("ledger", "lease", "control files"), "state"),
    **dict.fromkeys(("logs", "metrics", "stdout", "stderr"), "telling"),
}


def kinds(cell: Cell) -> tuple[str, ...]:
    return _KIND_OF_WHAT[cell.what], _KIND_OF_WHERE[cell.where], cell.when, cell.how


def pairs_of_kinds(cell: Cell) -> frozenset[Tuple]:
    """Each pair of kinds of what and where, when and how; and each value of its own."""
    return tuples_of(kinds(cell), 2) | tuples_of(values(cell), 1)


def triples_with_how(cell: Cell) -> frozenset[Tuple]:
    """Each two of what, where and when, for each how."""
    return frozenset(one for one in tuples_of(values(cell), 3) if one[-1][0] == HOW)


def few() -> list[Cell]:
    """What `make check` has: all pairs of kinds, and then what has the most new pairs of values."""
    chosen = covering(cells(), pairs_of_kinds)
    while len(chosen) < FEW:
        seen = frozenset().union(*(tuples_of(values(cell), 2) for cell in chosen))
        chosen.append(max(cells(), key=lambda cell: len(tuples_of(values(cell), 2) - seen)))
    return chosen


def many() -> list[Cell]:
    """What `make long` has."""
    return covering(cells(), triples_with_how)
