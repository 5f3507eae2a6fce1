"""What is played: programs, and for each where it is stopped, how, and how many ranks go on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Program:
    """A program of the folder `programs`, with what it is to be and where its boundaries are."""

    script: str
    kind: str
    variant: str
    steps: int = 14
    save_every: int = 4
    evaluate_every: int = 3
    epoch: int = 5
    """Steps in an epoch; as many samples are in the data."""
    micro: int = 1
    """Micro batches in a step, on one rank."""
    ranks: tuple[int, ...] = (1, 2)
    worlds: bool = True
    """Whether it may go on with another number of ranks: what it computes depends on no rank."""
    heeds: bool = True
    """Whether a SIGTERM has it commit its step."""
    family: str = ""
    """Of the kind: one of each is always drawn."""
    refused: str = ""
    """Of the sentence that refuses another number of ranks, words that docs/integrations.md has in
    its list; empty where it is not refused."""
    by_others: bool = False
    """Whether that is the library's own error, and so longer than a sentence."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.variant}"

    @property
    def moves(self) -> bool:
        """Whether there are cells in which it is started on another number of ranks."""
        return bool(self.refused) or (self.worlds and self.ranks == (1, 2))

    def boundaries(self) -> dict[str, int]:
        """A step at each kind of boundary that the program has, by name."""
        found = {"save": 2 * self.save_every, "last": self.steps}
        if self.evaluate_every:
            found["evaluation"] = 2 * self.evaluate_every
        if 0 < self.epoch < self.steps:
            found["epoch"] = max(range(self.epoch, self.steps, self.epoch))
        return found


@dataclass(frozen=True)
class Cell:
    """A program on some ranks which is stopped or killed at a place, and goes on."""

    program: Program
    ranks: int
    how: str
    """`stop` is a SIGTERM, `kill` a SIGKILL, `world` a SIGTERM after which the number of ranks is
    another."""
    where: str
    place: str
    """As `record.step` and `record.evaluation` call it."""

    @property
    def name(self) -> str:
        return f"{self.program.name}-{self.ranks}-{self.how}-{self.where}"

    @property
    def refused(self) -> str:
        """The words with which the second start is refused; empty if it is to go on."""
        return self.program.refused if self.how == "world" else ""

    @property
    def goes_on_with(self) -> int:
        """How many ranks the second start has."""
        return {1: 2, 2: 1}[self.ranks] if self.how == "world" else self.ranks


MOST = {"stop": 5, "kill": 4, "world": 3}
"""The most cells of a program on a number of ranks; which ones differs from program to program."""


def cells_of(programs: Iterable[Program]) -> list[Cell]:
    """The cells of these programs; no two of a program strike at the same place."""
    return [
        cell
        for program in programs
        for ranks in program.ranks
        for how in MOST
        if how != "world" or program.moves
        for cell in _some(list(_struck(program, ranks, how)), MOST[how])
    ]


def _some(cells: Sequence[Cell], number: int) -> list[Cell]:
    """At most `number` of the cells, in their order."""
    drawn = random.Random(cells[0].name).sample(cells, min(number, len(cells)))
    return [cell for cell in cells if cell in drawn]


def _struck(program: Program, ranks: int, how: str) -> Iterator[Cell]:
    taken: set[str] = set()
    for where, place in _places(program, ranks, how):
        if place not in taken:
            taken.add(place)
            yield Cell(program, ranks, how, where, place)


def _places(program: Program, ranks: int, how: str) -> Iterator[tuple[str, str]]:
    """Where to strike, by name: at each boundary, a step before and after it, and at random."""
    drawn = random.Random(f"{program.name} {ranks} {how}")
    boundaries = program.boundaries()
    if how == "world":
        boundaries = {name: step for name, step in boundaries.items() if name in ("save", "epoch")}
    late = how != "kill" and program.heeds  # a stop is agreed on in the next step
    for name, step in boundaries.items():
        for away in (-1, 0, 1):
            if 1 <= step + away - late <= program.steps:
                yield f"{name}{away:+}" if away else name, str(step + away - late)
    if how == "world":
        return
    if program.evaluate_every:
        yield "within-evaluation", f"evaluation {program.evaluate_every}"
    if program.micro > 1:
        # The last step of an epoch may have fewer micro batches.
        whole = [n for n in range(2, program.steps) if program.epoch == 0 or n % program.epoch]
        yield "within-accumulation", f"{drawn.choice(whole)}.{program.micro - 1}"
    yield "first", "1"
    yield "random", str(drawn.randint(2, program.steps - 1))


def draw(cells: Sequence[Cell], seed: str, number: int) -> set[Cell]:
    """`number` cells by `seed`, of every kind and family of programs about as many. Of a program
    that is drawn there is one of each way to strike: they share its undisturbed run."""
    drawn = random.Random(seed)
    by_kind: dict[tuple[str, str], list[list[Cell]]] = {}
    by_run = groupby(cells, key=lambda cell: (cell.program.name, cell.ranks))
    groups = [list(group) for _, group in by_run]
    for group in drawn.sample(groups, k=len(groups)):
        one_of_each = {cell.how: cell for cell in drawn.sample(group, k=len(group))}
        program = group[0].program
        of_kind = by_kind.setdefault((program.kind, program.family), [])
        of_kind.append(list(one_of_each.values()))
    found: list[Cell] = []
    while len(found) < number and any(by_kind.values()):
        for of_kind in by_kind.values():
            found += of_kind.pop() if of_kind else []
    return set(found[:number])
