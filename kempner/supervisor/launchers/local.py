"""Local launcher: ranks are children of the supervisor on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import BinaryIO

from kempner.cluster.network.ports import free_port
from kempner.cluster.slurm.hostlist import node_name
from kempner.run.control.launch_env import Launch
from kempner.run.output.logs import logger
from kempner.run.process.signals import STOP_SIGNALS
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.launchers.base import CannotRestart, Program
from kempner.supervisor.launchers.family import Family
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult, measure
from kempner.supervisor.policy.outcome import RankExit

_LOOPBACK = "127.0.0.1"

GONE_WITHIN = 60.0
"""Seconds that ranks which were killed get to be gone before the next ones start."""

_LOOK = 0.2
"""Seconds between two looks whether the program in a wrapper has ended."""


class LocalLauncher:
    """`size` ranks here, each in a session of its own.

    A terminal's Ctrl-C therefore reaches the supervisor alone. Each rank asks the kernel to be told
    when the supervisor dies, so none outlives it unnoticed. A stop and a kill reach all that a rank
    has started: it may be a wrapper around the program. Rank 0 shares the supervisor's output; the
    others' goes to the attempt's folder.
    """

    address = _LOOPBACK

    def __init__(self, run: RunDirectory, size: int) -> None:
        self._run, self.size = run, size
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._family = Family()
        self._asked = threading.Event()
        self._waiters: list[threading.Thread] = []

    @property
    def nodes(self) -> Sequence[str]:
        """This machine."""
        return [node_name(os.environ)]

    def survey(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """Ask this machine."""
        return [measure(question)]

    def avoid(self, suspects: Mapping[str, str]) -> None:
        """Nothing: there is no other machine."""

    def unavoidable(self, suspects: Collection[str]) -> Sequence[str]:
        """None: no other machine would be any better."""
        return ()

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start every rank as `program`, and wait for each on a thread."""
        port = free_port(_LOOPBACK, salt=f"{self._run.path.absolute()}:{launch.attempt.nonce}")
        # Blocked here, the signals are blocked in the children from their first instruction until
        # they trap them: one that comes while their interpreter starts is kept, not fatal.
        block = STOP_SIGNALS if program.ours else ()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, block)
        try:
            for rank in range(self.size):
                self._children[rank] = self._spawn(rank, launch, port, program.command)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for rank, child in self._children.items():
            waiter = threading.Thread(target=self._wait, args=(rank, child, post), name="wait")
            waiter.daemon = True
            self._waiters.append(waiter)
            waiter.start()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to every living rank, and through a wrapper to the program in it."""
        self._asked.set()
        self._family.ask_to_stop()

    def kill(self) -> None:
        """Send SIGKILL to every living rank and all that it has started; returns when it is gone.

        A process that is stuck in the kernel is named, and ends as soon as that lets it go.
        """
        for rank, child in self._children.items():
            if child.poll() is None:
                self._killed.add(rank)
        self._family.kill()
        self._family.bury(self._tops)

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """In this block the ranks stand still, and this process may do so, too."""
        self._family.pause()
        try:
            yield True
        finally:
            self._family.go_on()

    def alive(self) -> bool:
        """Whether any rank has not been seen to end."""
        self._family.bury(self._tops)
        return any(waiter.is_alive() for waiter in self._waiters)

    def waits(self) -> bool:
        """No: they are started at once."""
        return False

    def prepare_again(
        self, lost: Sequence[str], stuck: Mapping[str, Sequence[int]]
    ) -> CannotRestart | None:
        """This machine is there: wait until the last rank is gone."""
        end = time.monotonic() + GONE_WITHIN
        for waiter in self._waiters:
            waiter.join(max(0.0, end - time.monotonic()))
        if any(waiter.is_alive() for waiter in self._waiters):
            reason = "a rank of the attempt before cannot be killed, and nothing can replace it"
            return CannotRestart(f"{reason} on this machine", ())
        self._waiters.clear()
        self._children.clear()
        self._killed.clear()
        self._asked.clear()
        return None

    @property
    def _tops(self) -> set[int]:
        """The process ids of the ranks, or of the wrappers around them."""
        return {child.pid for child in self._children.values()}

    def _wait(
        self, rank: int, child: subprocess.Popen[bytes], post: Callable[[RankExit], None]
    ) -> None:
        """Post the end of a rank.

        A wrapper that our SIGTERM ends leaves the program behind, which may still have to commit:
        the rank ends with that.
        """
        status = child.wait()
        if status == -signal.SIGTERM and self._asked.is_set():
            while self._family.stops():
                time.sleep(_LOOK)
        post(RankExit(rank, status, ended_by_us=rank in self._killed))

    def _spawn(
        self, rank: int, launch: Launch, port: int, command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **replace(launch, parent=os.getpid()).environment(),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
        }
        environment.pop("TORCHELASTIC_RUN_ID", None)
        with self._open_output(launch.attempt.number, rank) as output:
            return subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
            )

    def _open_output(self, attempt: int, rank: int) -> AbstractContextManager[BinaryIO | None]:
        """Where a rank's output goes; None for where the supervisor's goes."""
        if rank == 0:
            return nullcontext()
        try:
            return open(self._run.output(attempt, rank), "ab")
        except OSError as error:
            sentence = f"rank {rank} prints to the supervisor's output"
            logger().warning(sentence, file=error.filename, error=error.strerror)
            return nullcontext()
