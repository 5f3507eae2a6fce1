"""The launcher interface: start, signal and kill ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from kempner.checkpoint.slots.pour import Offer, Poured
from kempner.run.control.launch_env import Launch
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult
from kempner.supervisor.policy.outcome import RankExit


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

    @property
    def cold(self) -> tuple[str, ...]:
        """The command of a process that is not forked."""
        if self.modules and not self.ours:
            return (self.python, *_EXEC_RANK, *self.command)
        return self.command


_OF_TRAIN = ("kempner.cli.entry", "kempner.cli.train", "kempner.training.imports")
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


class Launcher(Protocol):
    """Starts one attempt's ranks. How they end, the control channel tells, too, where it can."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Those of this machine at which ranks may reach the supervisor, the likeliest first."""

    @property
    def size(self) -> int:
        """How many ranks `start` starts."""

    @property
    def used(self) -> Sequence[str]:
        """The nodes of the ranks."""

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes of the ranks, and those in reserve."""

    def prepare(self, program: Program) -> None:
        """Begin with what takes long and needs no decision, such as imports. In the main thread."""

    @property
    def idle(self) -> Idle:
        """Nodes to which the ranks could grow again."""

    @property
    def joined(self) -> Mapping[str, JoinedNode]:
        """All nodes of other jobs that ever joined, whether they are still there or not."""

    def invite(self, invitation: Path) -> None:
        """Have nodes of other jobs join, where that is possible: this file tells them how, until
        `close`."""

    def ask_idle(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """Ask these nodes, while the ranks run; the answers of those that gave one. From any
        thread."""

    def survey(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """Ask all `nodes`, for some seconds; the answers of those that gave one."""

    def avoid(self, suspects: Mapping[str, str]) -> None:
        """Start no ranks on these nodes (each with a reason) if others can do, or fewer.

        Nodes that are named no more are used again, if some are missing.
        """

    def unavoidable(self, suspects: Collection[str]) -> Sequence[str]:
        """Those of these nodes on which ranks would be started all the same."""

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start every rank as `program`, with `launch` in its environment.

        `post` is called, from any thread, with each end that the launcher gets to see.
        """

    def ask_to_stop(self) -> None:
        """Signal every living rank to stop. Asking twice does no harm."""

    def kill(self) -> None:
        """End every living rank at once."""

    def alive(self) -> bool:
        """Whether anything that was started is still there; all ends have been posted if not."""

    def waits(self) -> bool:
        """Whether the ranks cannot be started yet, because Slurm does not answer, say."""

    def prepare_again(
        self, lost: Sequence[str], stuck: Mapping[str, Sequence[int]]
    ) -> CannotRestart | None:
        """Get ready to start once more, without those of the `lost` hosts that do not answer.

        Nor on a host where one of the `stuck` processes, which were killed, still runs. May take a
        minute. Returns why there can be no other start here, or None if there can.
        """

    def offers(self, nonce: str) -> Sequence[Offer]:
        """The steps of the attempt with this nonce that are held in memory, once its ranks are
        gone; with nodes that cannot be reached, those of their buddies. Raises `OSError`."""

    def pour(self, nonce: str, step: int, folder: Path) -> Sequence[Poured]:
        """Write what is held of a step into a folder on every node's storage. Raises `OSError`."""

    def look(self, node: str, pids: Sequence[int]) -> Sequence[str]:
        """What can be seen from outside of processes on another node: a line each, or none without
        an answer. From any thread."""

    def close(self) -> None:
        """End what was started to start ranks: no others follow."""


class BareLauncher:
    """Defaults of a launcher that takes no nodes of other jobs, and keeps no steps in memory."""

    @property
    def joined(self) -> Mapping[str, JoinedNode]:
        """None: no node can join."""
        return {}

    def invite(self, invitation: Path) -> None:
        """Write no invitation."""

    def offers(self, nonce: str) -> Sequence[Offer]:
        """Nothing: no process on a node outlives the ranks there."""
        return ()

    def pour(self, nonce: str, step: int, folder: Path) -> Sequence[Poured]:
        """Write nothing."""
        return ()
