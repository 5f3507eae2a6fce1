"""Ranks that are children of this process: started, forked if possible, signalled and followed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kempner.run.control.program.heartbeat_file import path_in
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import STOP_SIGNALS
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.family import Family
from kempner.supervisor.launchers.fork_server.client import (
    CannotForkError,
    ForkServerClient,
    StartedProcess,
)
from kempner.supervisor.launchers.rank_output import RankOutput
from kempner.supervisor.policy.outcome import RankExit

_LOOK = 0.2
"""Seconds between two looks whether the program in a wrapper has ended."""


@dataclass(frozen=True)
class ChildRank:
    """A rank to start: its environment, the file for its output (None: where this process prints)
    and the CPUs that it may use (none: all of this process's)."""

    rank: int
    environ: Mapping[str, str]
    output: Path | None = None
    cpus: tuple[int, ...] = ()


class Children:
    """The ranks that this process has started, each in a session of its own.

    A stop and a kill reach all that a rank has started: it may be a wrapper around the program.
    """

    def __init__(self) -> None:
        self._server: ForkServerClient | None = None
        self._family = Family(lambda: None if self._server is None else self._server.pid)
        self._started: dict[int, StartedProcess] = {}
        self._killed: set[int] = set()
        self._asked, self._over = threading.Event(), threading.Event()
        self._signalled = False
        self._watchers: list[threading.Thread] = []

    def prepare(self, program: Program) -> None:
        """Start the imports; to be called in the main thread."""
        if not program.modules:
            return
        if self._server is None:
            self._server = ForkServerClient(program.modules)
        self._server.start()

    def start(self, child: ChildRank, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start a rank and follow it on a thread, which posts its end."""
        watcher = threading.Thread(
            target=self._follow, args=(child, program, post), name="rank", daemon=True
        )
        self._watchers.append(watcher)
        watcher.start()

    def pid(self, rank: int) -> int | None:
        """The process of a rank, once it was started."""
        child = self._started.get(rank)
        return None if child is None else child.pid

    def ask_to_stop(self) -> None:
        """Send SIGTERM to every living rank, and through a wrapper to the program in it."""
        self._asked.set()
        self._give_up_orders()
        self._family.ask_to_stop()

    def signal(self, number: signal.Signals) -> None:
        """Send any other signal to every living rank."""
        self._signalled = True
        for child in list(self._started.values()):
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to every living rank and all that it has started; returns when it is gone.

        A process that is stuck in the kernel is named, and ends as soon as that lets it go.
        """
        self._over.set()
        self._give_up_orders()
        for rank, child in list(self._started.items()):
            if child.poll() is None:
                self._killed.add(rank)
        self._family.kill()
        self._family.reap(self._tops)

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
        self._family.reap(self._tops)
        return any(watcher.is_alive() for watcher in self._watchers)

    def forget(self, within: float) -> bool:
        """Get ready for the next ranks; False if one is still there after `within` seconds."""
        end = time.monotonic() + within
        for watcher in self._watchers:
            watcher.join(max(0.0, end - time.monotonic()))
        if any(watcher.is_alive() for watcher in self._watchers):
            return False
        self._watchers.clear()
        self._started.clear()
        self._killed.clear()
        self._asked.clear()
        self._over.clear()
        self._signalled = False
        return True

    def close(self) -> None:
        """End the fork server."""
        if self._server is not None:
            self._server.close()

    @property
    def _tops(self) -> set[int]:
        """The process ids of the ranks, or of the wrappers around them."""
        return {child.pid for child in list(self._started.values())}

    def _give_up_orders(self) -> None:
        """Who is not forked yet need not be any more."""
        if self._server is not None:
            self._server.give_up_orders()

    def _follow(self, child: ChildRank, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start the rank and post its end. The thread lives as long as the rank: the kernel tells a
        child of the end of the thread that started it.

        A wrapper that our SIGTERM ends leaves the program behind, which may still have to commit:
        the rank ends with that.
        """
        rank = child.rank
        if program.ours:
            # Blocked here, the signals are blocked in the rank from its first instruction until it
            # traps them: one that comes while its interpreter starts is kept, not fatal.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            started, output = self._spawn(child, program)
        except OSError as error:
            sentence = f"it cannot be started: {error.strerror}"
            post(RankExit(rank, ExitCode.CRASHED, sentence=sentence))
            return
        if started is None:
            killed = self._over.is_set() and not self._asked.is_set()
            code = -signal.SIGKILL if killed else ExitCode.STOPPED
            post(RankExit(rank, code, ended_by_us=self._over.is_set()))
            return
        status = started.wait()
        asked = self._asked.is_set() or self._signalled
        if status == -signal.SIGTERM and self._asked.is_set():
            while self._family.stops():
                time.sleep(_LOOK)
        if output is not None:
            output.end()
        post(RankExit(rank, status, ended_by_us=rank in self._killed, asked=asked))

    def _spawn(
        self, child: ChildRank, program: Program
    ) -> tuple[StartedProcess | None, RankOutput | None]:
        """The process of a rank: forked if possible, None if a stop came first; and what reads what
        it prints, if that is looked at.

        Raises `OSError` if it cannot be started.
        """
        with _open_output(child) as file:
            target = None if file is None else file.fileno()
            output = _looked_at(child, program, target)
            if output is None:
                return self._begin(child, program, target), None
            with output.pipe():
                started = self._begin(child, program, output.writing, (output.reading,))
                if started is not None:
                    output.begin()
            return started, output

    def _begin(
        self, child: ChildRank, program: Program, output: int | None, keep: Sequence[int] = ()
    ) -> StartedProcess | None:
        """The process, as `_spawn`. It prints to `output` and inherits the descriptors `keep`."""
        started: StartedProcess | None = None
        if self._server is not None and program.modules:
            try:
                started = self._server.fork(
                    program.command, child.environ, output, program.ours, child.cpus
                )
            except CannotForkError as error:
                if not (self._asked.is_set() or self._over.is_set()):
                    logger().warning("a rank is not forked", rank=child.rank, reason=str(error))
        if started is None:
            if self._asked.is_set() or self._over.is_set():
                return None
            if child.cpus:
                os.sched_setaffinity(0, child.cpus)  # of this thread, and so of the child
            started = subprocess.Popen(
                program.cold,
                env=child.environ,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                pass_fds=keep,
            )
        self._started[child.rank] = started
        if self._over.is_set():  # meanwhile
            self._killed.add(child.rank)
            self._family.kill()
        elif self._asked.is_set():
            self._family.ask_to_stop()
        return started


def _looked_at(child: ChildRank, program: Program, target: int | None) -> RankOutput | None:
    """The pipe for what a rank prints, if its step is searched for there."""
    heartbeat = path_in(child.environ)
    if not program.pattern or heartbeat is None:
        return None
    return RankOutput(program.pattern, 1 if target is None else os.dup(target), heartbeat)


def _open_output(child: ChildRank) -> AbstractContextManager[BinaryIO | None]:
    """Where a rank's output goes; None for where this process's goes."""
    if child.output is None:
        return nullcontext()
    try:
        return open(child.output, "ab")
    except OSError as error:
        sentence = f"rank {child.rank} prints to the supervisor's output"
        logger().warning(sentence, file=error.filename, error=error.strerror)
        return nullcontext()
