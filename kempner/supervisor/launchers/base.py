"""The launcher interface: start, signal and kill ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from kempner.run.control.launch_env import Launch
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult
from kempner.supervisor.policy.outcome import RankExit


@dataclass(frozen=True)
class Program:
    """What each rank runs: our own `train`, or a command of the user's.

    Of a command that is not `ours` nothing is known but what any process does: a stop signal ends
    it, unless it traps it. A fork server imports `modules` first; without any, each rank starts as
    a process of its own.
    """

    command: tuple[str, ...]
    ours: bool
    modules: tuple[str, ...] = ()

    @classmethod
    def train(cls, arguments: Sequence[str], fork: bool = True) -> Self:
        """`kempner train <arguments>`."""
        command = (sys.executable, "-m", "kempner", "train", *arguments)
        return cls(command, ours=True, modules=_OF_TRAIN if fork else ())

    @classmethod
    def of_user(cls, command: Sequence[str], modules: Sequence[str] = ()) -> Self:
        """A command that reads its place in the world from torch's variables."""
        if modules:
            return cls(tuple(command), ours=False, modules=tuple(modules))
        return cls((*_EXEC_RANK, *command), ours=False)

    @property
    def cold(self) -> tuple[str, ...]:
        """The command of a process that is not forked."""
        return (*_EXEC_RANK, *self.command) if self.modules and not self.ours else self.command


_OF_TRAIN = ("kempner.cli.entry", "kempner.cli.train", "kempner.training.imports")
_EXEC_RANK = (sys.executable, "-m", "kempner.supervisor.launchers.exec_rank")


@dataclass(frozen=True)
class CannotRestart:
    """Why the ranks cannot be started here again, and which nodes are to blame."""

    reason: str
    nodes: tuple[str, ...]


class Launcher(Protocol):
    """Starts one attempt's ranks. How they end, the control channel tells, too, where it can."""

    @property
    def address(self) -> str:
        """The address of this machine at which the ranks reach the supervisor."""

    @property
    def size(self) -> int:
        """How many ranks `start` starts."""

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes of the ranks, and those in reserve."""

    def prepare(self, program: Program) -> None:
        """Begin with what takes long and needs no decision, such as imports. In the main thread."""

    def survey(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """Ask all `nodes`, for some seconds; the answers of those that gave one."""

    def avoid(self, suspects: Mapping[str, str]) -> None:
        """Start no ranks on these nodes (each with a reason) if others can do, or fewer."""

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

    def look(self, node: str, pids: Sequence[int]) -> Sequence[str]:
        """What can be seen from outside of processes on another node: a line each, or none if
        nobody answers. From any thread."""

    def close(self) -> None:
        """No other ranks are started: end what was started to do so."""
