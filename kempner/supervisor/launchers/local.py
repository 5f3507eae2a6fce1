"""Local launcher: ranks are processes on this machine, forked from a server that has torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kempner.checkpoint.slots.memory import SlotHolder
from kempner.checkpoint.slots.pour import Offer, Poured, offers, pour
from kempner.cluster.network.ports import free_port
from kempner.cluster.slurm.hostlist import node_name
from kempner.run.control.launch_env import Launch
from kempner.run.output.logs import logger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.launchers.base import BareLauncher, CannotRestart, Idle, Program
from kempner.supervisor.launchers.children import ChildRank, Children
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult, measure
from kempner.supervisor.policy.outcome import RankExit

_LOOPBACK = "127.0.0.1"

GONE_WITHIN = 60.0
"""Seconds to wait until killed ranks are gone, before the next ones start."""


class LocalLauncher(BareLauncher):
    """`size` ranks here, each in a session of its own.

    A terminal's Ctrl-C therefore reaches the supervisor alone. Each rank is told when the
    supervisor dies, so none outlives it unnoticed. A stop and a kill reach all that a rank
    has started: it may be a wrapper around the program. Rank 0 shares the supervisor's output; the
    others' goes to the attempt's folder.
    """

    addresses = (_LOOPBACK,)

    def __init__(self, run: RunDirectory, size: int) -> None:
        self._run, self.size = run, size
        self._children, self._slots = Children(), SlotHolder()

    @property
    def used(self) -> Sequence[str]:
        """This machine."""
        return self.nodes

    @property
    def nodes(self) -> Sequence[str]:
        """This machine."""
        return [node_name(os.environ)]

    @property
    def idle(self) -> Idle:
        """None: there is no other machine."""
        return Idle()

    def ask_idle(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """No answers: there is no other machine."""
        return ()

    def survey(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """Ask this machine."""
        return [measure(question)]

    def avoid(self, suspects: Mapping[str, str]) -> None:
        """Nothing: there is no other machine."""

    def unavoidable(self, suspects: Collection[str]) -> Sequence[str]:
        """None: no other machine would be any better."""
        return ()

    def prepare(self, program: Program) -> None:
        """Start the imports; to be called in the main thread."""
        self._children.prepare(program)

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start every rank as `program`, and follow each on a thread."""
        self.prepare(program)
        port = free_port(_LOOPBACK, salt=f"{self._run.path.absolute()}:{launch.attempt.nonce}")
        common = {**os.environ, **replace(launch, parent=os.getpid()).environment()}
        common.pop("TORCHELASTIC_RUN_ID", None)
        if not launch.in_memory:
            self._slots.keep_only(())
        for rank in range(self.size):
            output = self._run.output(launch.attempt.number, rank) if rank else None
            environ = {**common, **self._place(rank, port), **launch.of_rank(rank, common)}
            if launch.in_memory:
                self._slots.lend(rank, environ)
            child = ChildRank(rank, environ, output)
            self._children.start(child, program, post)

    def ask_to_stop(self) -> None:
        """Send SIGTERM to every living rank, and through a wrapper to the program in it."""
        self._children.ask_to_stop()

    def kill(self) -> None:
        """Send SIGKILL to every living rank and all that it has started; returns when it is gone.

        A process that is stuck in the kernel is named, and ends as soon as that lets it go.
        """
        self._children.kill()

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """In this block the ranks stand still, and this process may do so, too."""
        with self._children.paused() as may_pause:
            yield may_pause

    def alive(self) -> bool:
        """Whether any rank has not been seen to end."""
        return self._children.alive()

    def waits(self) -> bool:
        """No: they are started at once."""
        return False

    def prepare_again(
        self, lost: Sequence[str], stuck: Mapping[str, Sequence[int]]
    ) -> CannotRestart | None:
        """This machine is there: wait until the last rank is gone."""
        if not self._children.forget(GONE_WITHIN):
            reason = "a rank of the attempt before cannot be killed, and nothing can replace it"
            return CannotRestart(f"{reason} on this machine", ())
        return None

    def offers(self, nonce: str) -> Sequence[Offer]:
        """What this process holds."""
        if self.alive():
            logger().warning("a rank is still there, so its steps in memory are not salvaged")
            return ()
        return offers(self._slots, nonce)

    def pour(self, nonce: str, step: int, folder: Path) -> Sequence[Poured]:
        """Write the files from this process."""
        return pour(self._slots, nonce, step, folder)

    def look(self, node: str, pids: Sequence[int]) -> Sequence[str]:
        """Nothing: there is no other node."""
        return ()

    def close(self) -> None:
        """End the fork server."""
        self._children.close()

    def _place(self, rank: int, port: int) -> dict[str, str]:
        """A rank's place in the world, under torch's names."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
        }
