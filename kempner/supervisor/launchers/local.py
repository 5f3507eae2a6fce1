"""Local launcher: ranks are processes on this machine, forked from a server that has torch."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from kempner.cluster.network.ports import free_port
from kempner.cluster.slurm.hostlist import node_name
from kempner.run.control.launch_env import Launch
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import STOP_SIGNALS
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.launchers.base import CannotRestart, Program
from kempner.supervisor.launchers.family import Family
from kempner.supervisor.launchers.fork_server.client import (
    CannotForkError,
    ForkServerClient,
    Started,
)
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult, measure
from kempner.supervisor.policy.outcome import RankExit

_LOOPBACK = "127.0.0.1"

GONE_WITHIN = 60.0
"""Seconds that ranks which were killed get to be gone before the next ones start."""

_LOOK = 0.2
"""Seconds between two looks whether the program in a wrapper has ended."""


class LocalLauncher:
    """`size` ranks here, each in a session of its own.

    A terminal's Ctrl-C therefore reaches the supervisor alone. Each rank is told when the
    supervisor dies, so none outlives it unnoticed. A stop and a kill reach all that a rank
    has started: it may be a wrapper around the program. Rank 0 shares the supervisor's output; the
    others' goes to the attempt's folder.
    """

    address = _LOOPBACK

    def __init__(self, run: RunDirectory, size: int) -> None:
        self._run, self.size = run, size
        self._server: ForkServerClient | None = None
        self._family = Family(lambda: None if self._server is None else self._server.pid)
        self._children: dict[int, Started] = {}
        self._killed: set[int] = set()
        self._asked, self._over = threading.Event(), threading.Event()
        self._watchers: list[threading.Thread] = []

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

    def prepare(self, program: Program) -> None:
        """Start the imports; to be called in the main thread."""
        if not program.modules:
            return
        if self._server is None:
            self._server = ForkServerClient(program.modules)
        self._server.start()

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start every rank as `program`, and follow each on a thread."""
        self.prepare(program)
        port = free_port(_LOOPBACK, salt=f"{self._run.path.absolute()}:{launch.attempt.nonce}")
        common = {**os.environ, **replace(launch, parent=os.getpid()).environment()}
        common.pop("TORCHELASTIC_RUN_ID", None)
        for rank in range(self.size):
            place = self._place(rank, port)
            follow = partial(
                self._follow, rank, launch.attempt.number, program, {**common, **place}
            )
            watcher = threading.Thread(target=follow, args=(post,), name="rank", daemon=True)
            self._watchers.append(watcher)
            watcher.start()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to every living rank, and through a wrapper to the program in it."""
        self._asked.set()
        self._give_up_orders()
        self._family.ask_to_stop()

    def kill(self) -> None:
        """Send SIGKILL to every living rank and all that it has started; returns when it is gone.

        A process that is stuck in the kernel is named, and ends as soon as that lets it go.
        """
        self._over.set()
        self._give_up_orders()
        for rank, child in list(self._children.items()):
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
        return any(watcher.is_alive() for watcher in self._watchers)

    def waits(self) -> bool:
        """No: they are started at once."""
        return False

    def prepare_again(
        self, lost: Sequence[str], stuck: Mapping[str, Sequence[int]]
    ) -> CannotRestart | None:
        """This machine is there: wait until the last rank is gone."""
        end = time.monotonic() + GONE_WITHIN
        for watcher in self._watchers:
            watcher.join(max(0.0, end - time.monotonic()))
        if any(watcher.is_alive() for watcher in self._watchers):
            reason = "a rank of the attempt before cannot be killed, and nothing can replace it"
            return CannotRestart(f"{reason} on this machine", ())
        self._watchers.clear()
        self._children.clear()
        self._killed.clear()
        self._asked.clear()
        self._over.clear()
        return None

    @property
    def _tops(self) -> set[int]:
        """The process ids of the ranks, or of the wrappers around them."""
        return {child.pid for child in list(self._children.values())}

    def _give_up_orders(self) -> None:
        """Who is not forked yet need not be any more."""
        if self._server is not None:
            self._server.give_up_orders()

    def _follow(
        self,
        rank: int,
        attempt: int,
        program: Program,
        environ: Mapping[str, str],
        post: Callable[[RankExit], None],
    ) -> None:
        """Start a rank and post its end. The thread lives as long as the rank: the kernel tells a
        child of the end of the thread that started it.

        A wrapper that our SIGTERM ends leaves the program behind, which may still have to commit:
        the rank ends with that.
        """
        if program.ours:
            # Blocked here, the signals are blocked in the rank from its first instruction until it
            # traps them: one that comes while its interpreter starts is kept, not fatal.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            child = self._spawn(rank, attempt, program, environ)
        except OSError as error:
            sentence = f"it cannot be started: {error.strerror}"
            post(RankExit(rank, ExitCode.CRASHED, sentence=sentence))
            return
        if child is None:
            post(RankExit(rank, ExitCode.STOPPED, ended_by_us=self._over.is_set()))
            return
        status = child.wait()
        if status == -signal.SIGTERM and self._asked.is_set():
            while self._family.stops():
                time.sleep(_LOOK)
        post(RankExit(rank, status, ended_by_us=rank in self._killed))

    def _spawn(
        self, rank: int, attempt: int, program: Program, environ: Mapping[str, str]
    ) -> Started | None:
        """The process of a rank: forked if possible. None if a stop came first.

        Raises `OSError` if it cannot be started.
        """
        with self._open_output(attempt, rank) as output:
            file = None if output is None else output.fileno()
            child: Started | None = None
            if self._server is not None and program.modules:
                try:
                    child = self._server.fork(program.command, environ, file, program.ours)
                except CannotForkError as error:
                    if not (self._asked.is_set() or self._over.is_set()):
                        logger().warning("a rank is not forked", rank=rank, reason=str(error))
            if child is None:
                if self._asked.is_set() or self._over.is_set():
                    return None
                child = subprocess.Popen(
                    program.cold,
                    env=environ,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=None if output is None else subprocess.STDOUT,
                )
        self._children[rank] = child
        if self._over.is_set():  # meanwhile
            self._killed.add(rank)
            self._family.kill()
        elif self._asked.is_set():
            self._family.ask_to_stop()
        return child

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
