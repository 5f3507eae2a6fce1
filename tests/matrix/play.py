"""Plays a cell: the program once undisturbed, once in trouble and then started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness import in_words, made_once, wait_until
from warm import Process
from warm.template import MODULES, Template

from kempner.cluster.network.ports import free_port
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.ledger import read_lines
from matrix.cells import Cell, Program
from matrix.compare import Notes, another_world, same_world

PROGRAMS = Path(__file__).with_name("programs")

TROUBLE = "KEMPNER_MATRIX_TROUBLE"
"""As `programs/record.py` reads it."""

MUTANT = "KEMPNER_MATRIX_MUTANT"
"""The mistake that is planted into kempner, by its name in `programs/mutants.py`."""


@cache
def template(*modules: str) -> Template:
    """Where ranks are forked from, which have imported these modules, too."""
    return Template((*MODULES, *modules), {"JE_ARROW_MALLOC_CONF": "background_thread:false"})


@dataclass(frozen=True)
class Start:
    """How the ranks of one start ended, and what they printed."""

    codes: tuple[int, ...]
    printed: str
    """Its end, which has the sentence or the exception."""


@dataclass(frozen=True)
class Player:
    """Plays the cells of programs that import these `modules`; `shared` is for undisturbed runs."""

    shared: Path
    modules: tuple[str, ...]
    mutant: str = ""

    def play(self, cell: Cell, folder: Path) -> list[str]:
        """What differs from the undisturbed run; nothing, if all is well."""
        undisturbed = self.undisturbed(cell.program, cell.ranks)
        first = self.start(cell.program, cell.ranks, folder, cell)
        self._check_trouble(cell, first)
        before = notes(folder, max(cell.ranks, cell.goes_on_with))
        second = self.start(cell.program, cell.goes_on_with, folder)
        if cell.refused:
            return list(_not_refused(cell, second, before, notes(folder, len(before))))
        if set(second.codes) != {0}:
            return [f"started again, it ended with {second.codes}: {second.printed}"]
        found = notes(folder, max(cell.ranks, cell.goes_on_with))
        if cell.how == "world":
            return list(another_world(undisturbed, found))
        return list(same_world(undisturbed, found, once=cell.how == "stop" and cell.program.heeds))

    def undisturbed(self, program: Program, ranks: int) -> list[Notes]:
        """What the program notes when nothing happens. Made once for all its cells."""

        def make(folder: Path) -> None:
            start = self.start(program, ranks, folder)
            assert set(start.codes) == {0}, start.printed

        whole = made_once(self.shared / f"undisturbed-{program.name}-{ranks}", make)
        return notes(whole, ranks)

    def _check_trouble(self, cell: Cell, first: Start) -> None:
        """It came, and the program heeded it."""
        if cell.how == "kill" or not cell.program.heeds:
            assert -signal.SIGKILL in first.codes or -signal.SIGTERM in first.codes, first.printed
        else:
            last = cell.program.steps
            # The ranks may agree on it one step later, and what was the last step completes.
            at_the_end = float(cell.place.rpartition(" ")[2]) >= last - 2
            allowed = {int(ExitCode.STOPPED)} | ({0} if at_the_end else set())
            assert set(first.codes) <= allowed, (first.codes, first.printed)

    def start(
        self, program: Program, ranks: int, folder: Path, trouble: Cell | None = None
    ) -> Start:
        """Start all ranks in `folder`, and wait for their end; trouble comes to the last one."""
        folder.mkdir(exist_ok=True)
        number = len(list(folder.glob("start-*.out")))
        log = folder / f"start-{number}.out"
        kind = "kill" if trouble and trouble.how == "kill" else "stop"
        place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": free_port("127.0.0.1", str(folder)), "TORCHELASTIC_RUN_ID": "none"}
        common = {**os.environ, "OMP_NUM_THREADS": "1", MUTANT: self.mutant if number else ""}
        command = [str(PROGRAMS / program.script), program.kind, program.variant]
        started = []
        with open(log, "ab") as output:
            for rank in range(ranks):
                mine = dict(common)
                if ranks > 1:
                    mine |= in_words({**place, "RANK": rank, "LOCAL_RANK": rank})
                if trouble and rank == ranks - 1:
                    mine[TROUBLE] = f"{kind}@{trouble.place}"
                fork = template(*self.modules).fork
                started.append(fork(command, mine, output, folder, brief=True))
        codes = _wait(started, lambda: log.read_text(errors="replace"))
        return Start(codes, log.read_text(errors="replace")[-2000:])


def _not_refused(
    cell: Cell, second: Start, before: Sequence[Notes], after: Sequence[Notes]
) -> Iterator[str]:
    """What was otherwise than it is where a cell is refused."""
    wanted = {1} if cell.program.by_others else {ExitCode.USAGE, ExitCode.BAD_DATA}
    if not wanted.issuperset(second.codes):
        yield f"started again, it was not refused but ended with {second.codes}"
    if before != after:
        yield "it was refused after a step"
    lines = [line for line in second.printed.splitlines() if cell.refused in line]
    sentences = [line for line in lines if "kempner: " in line or cell.program.by_others]
    if not sentences or ("Traceback" in second.printed and not cell.program.by_others):
        yield f"no sentence has refused it: {second.printed}"


def _wait(ranks: Sequence[Process], said: Callable[[], str]) -> tuple[int, ...]:
    """Until all have ended. Where one was killed the others are, too, as by a supervisor."""

    def over() -> bool:
        codes = [rank.poll() for rank in ranks]
        return None not in codes or any(code is not None and code < 0 for code in codes)

    try:
        wait_until(over, "the ranks' end", 60)
    except AssertionError as late:
        raise AssertionError(f"{late}\n{said()}") from None
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    return tuple(rank.wait() for rank in ranks)


def notes(folder: Path, ranks: int) -> list[Notes]:
    """Of each rank all that it noted, in all starts."""
    return [Notes.of(read_lines(folder / f"notes-{rank}.jsonl")) for rank in range(ranks)]
