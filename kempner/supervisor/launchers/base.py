"""`Program`, which ranks run, and what a launcher reports of its nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kempner.run.process.worker_process import SAFE_MODULE

RANK_DEFAULTS = {"PYTHONFAULTHANDLER": "1"}
"""Environment of all ranks, unless the user sets it otherwise: a crash in native code prints the
Python stack."""


@dataclass(frozen=True)
class Program:
    """What each rank runs: kempner's own `train` (`ours`), or a command of the user's.

    A program that is not `ours` is assumed to do no more than any process: a stop signal ends it
    unless it traps it. `modules` are imported by a fork server, which then forks the ranks; without
    any, each rank is started as a new process. `python` is the interpreter for kempner's code in a
    rank. `pattern` finds the step in a rank's output; if empty, the output is not searched."""

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
        """A command that reads rank and world size from torch's environment variables."""
        if modules:
            return cls(tuple(command), False, tuple(modules), python, pattern)
        return cls((python, *_EXEC_RANK, *command), False, (), python, pattern)

    def in_torchrun(self, ranks: int) -> Self:
        """A torchrun per node, which starts `ranks` ranks of this program."""
        command = (self.python, *_EXEC_RANK, f"{TORCHRUN}{ranks}", *self.command)
        return type(self)(command, ours=True, python=self.python)

    @property
    def words(self) -> tuple[str, ...]:
        """The user's command, without the `exec_rank` in front of it."""
        return self.command if self.modules else self.command[1 + len(_EXEC_RANK) :]

    @property
    def cold(self) -> tuple[str, ...]:
        """The command with which to start a rank that is not forked."""
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
    """The nodes without ranks, and the number of nodes that the largest possible start would
    add."""

    nodes: tuple[str, ...] = ()
    missing: int = 0


@dataclass(frozen=True)
class JoinedNode:
    """A node of another job; times by `time.monotonic`, in seconds.

    `pid` is its agent. `until` is when it will begin to leave (None: never), `leaves_by` when it
    has to be gone (None: it has not asked to leave), for a `reason`."""

    job: str
    pid: int
    until: float | None
    leaves_by: float | None = None
    reason: str = ""

    @property
    def seconds_left(self) -> float | None:
        """Seconds until it begins to leave, or if it has begun, until it has to be gone; None for
        never."""
        end = self.until if self.leaves_by is None else self.leaves_by
        return None if end is None else end - time.monotonic()

    @property
    def of_job(self) -> str:
        """` of job ID`, for a sentence; empty outside of a job."""
        return f" of job {self.job}" if self.job else ""
