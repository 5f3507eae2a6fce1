"""What ranks run, and what a launcher says of its nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kempner.run.process.worker_process import SAFE_MODULE

TELLING = {"PYTHONFAULTHANDLER": "1"}
"""For all ranks, unless the user says otherwise: a crash in native code shows the Python stack."""


@dataclass(frozen=True)
class Program:
    """What each rank runs: our own `train`, or a command of the user's.

    Of a command that is not `ours` nothing is known but what any process does: a stop signal ends
    it, unless it traps it. A fork server imports `modules` first; without any, each rank starts as
    a process of its own. `python` runs what of kempner is in a rank. `pattern` finds the step in
    what a rank prints; if it is empty, the output is not searched.
    """

    command: tuple[str, ...]
    ours: bool
    modules: tuple[str, ...] = ()
    python: str = sys.executable
    pattern: str = ""

    @classmethod
    def train(
        cls, arguments: Sequence[str], fork: bool = True, python: str = sys.executable
    ) -> Self:
        """`kempner train <arguments>`."""
        command = (python, *SAFE_MODULE, "kempner", "train", *arguments)
        return cls(command, ours=True, modules=_OF_TRAIN if fork else (), python=python)

    @classmethod
    def of_user(
        cls,
        command: Sequence[str],
        modules: Sequence[str] = (),
        python: str = sys.executable,
        pattern: str = "",
    ) -> Self:
        """A command that reads its place in the world from torch's variables."""
        if modules:
            return cls(tuple(command), False, tuple(modules), python, pattern)
        return cls((python, *_EXEC_RANK, *command), False, (), python, pattern)

    def in_torchrun(self, ranks: int) -> Self:
        """One torchrun for the `ranks` of a node, each of which runs this."""
        command = (self.python, *_EXEC_RANK, f"{TORCHRUN}{ranks}", *self.command)
        return type(self)(command, ours=True, python=self.python)

    @property
    def words(self) -> tuple[str, ...]:
        """The user's command, without what of ours becomes it."""
        return self.command if self.modules else self.command[1 + len(_EXEC_RANK) :]

    @property
    def cold(self) -> tuple[str, ...]:
        """The command of a process that is not forked."""
        if self.modules and not self.ours:
            return (self.python, *_EXEC_RANK, *self.command)
        return self.command


_OF_TRAIN = ("kempner.cli.entry", "kempner.cli.train", "kempner.training.imports")
TORCHRUN = "--torchrun="
_EXEC_RANK = (*SAFE_MODULE, "kempner.supervisor.launchers.exec_rank")


@dataclass(frozen=True)
class CannotRestart:
    """Why the ranks cannot be started here again, and which nodes are to blame."""

    reason: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Idle:
    """The nodes without ranks, and how many nodes are `missing` for the largest start."""

    nodes: tuple[str, ...] = ()
    missing: int = 0


@dataclass(frozen=True)
class JoinedNode:
    """A node of another job; times by `time.monotonic`, in seconds.

    `pid` is its agent. `until` is when it will begin to leave, `leaves_by` when it has to have
    left, for a `reason`; None for never, and while nothing was said.
    """

    job: str
    pid: int
    until: float | None
    leaves_by: float | None = None
    reason: str = ""

    @property
    def seconds_left(self) -> float | None:
        """Until it begins to leave, and once it has, until it has to have left."""
        end = self.until if self.leaves_by is None else self.leaves_by
        return None if end is None else end - time.monotonic()

    @property
    def of_job(self) -> str:
        """The job of the node, for a sentence; empty outside of a job."""
        return f" of job {self.job}" if self.job else ""
