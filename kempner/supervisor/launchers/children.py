"""Starts ranks as children of this process, forked if possible; signals and kills them with all
that they have started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import psutil

from kempner.run.control.launch_env import FORK_SERVER, Launch
from kempner.run.control.leftovers import processes_to_signal
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import STOP_SIGNALS
from kempner.run.process.threads import start_thread
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.fork_server.client import (
    CannotForkError,
    ForkServerClient,
    StartedProcess,
)
from kempner.supervisor.launchers.rank_output import ChildRank, RankOutput
from kempner.supervisor.policy.outcome import RankExit, find_last_words

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

KILL_TIME = 2.0
"""Seconds within which a killed process is gone, unless it is stuck in the kernel."""

_LOOK_AT_FAMILY = 0.01
"""Seconds between two checks that they are gone."""


class Family:
    """The ranks and their descendants, including orphans.

    An orphan becomes the child of this process, its sub-reaper (prctl(2)). So even a daemon in a
    session of its own is found: it is a child in another session than this process's, and no
    process can enter this process's session from another one. Only the first process of a container
    (pid 1) also gets orphans that it has not started; there the ranks' environment tells them
    apart.

    A fork server, whose process id `server` returns, is not a member, but all of its children are.
    """

    def __init__(self, server: Callable[[], int | None] = lambda: None) -> None:
        self._server = server
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            logger().warning("a process that leaves its parent may outlive the run", reason=reason)
        below = [process.pid for process in psutil.Process().children(recursive=True)]
        self._others = {session for session in map(_session_of, below) if session}
        self._others.add(os.getsid(0))
        self._stopping: list[psutil.Process] = []
        self._stuck: set[int] = set()

    def ask_to_stop(self, informed: Collection[int] = ()) -> None:
        """Send SIGTERM to each process that can act on it, except those in `informed`, which know
        of the stop.

        The children of a process that traps the signal get none: without its data-loader workers,
        say, its last step would fail. A process that does not trap it, such as a shell that runs a
        script, ends and leaves its children, so they get it as well."""
        asked = [found for head in self._heads() for found in processes_to_signal(head, informed)]
        # Before the signals: another thread calls `stops` as soon as a wrapper has ended.
        self._stopping += [process for process, answers in asked if answers]
        for process in (process for process, _ in asked if process.pid not in informed):
            with suppress(psutil.Error):
                process.terminate()

    def stops(self) -> bool:
        """Whether a process that was asked to stop, and traps SIGTERM, has not ended yet."""
        return any(_lives(process) for process in self._stopping)

    def kill(self) -> None:
        """Send SIGKILL to all, and to those that they start meanwhile. A process that is not gone
        after `KILL_TIME` is stuck in the kernel or another user's, and is logged once."""
        end = time.monotonic() + KILL_TIME
        while True:
            members = self._members()
            for member in members:
                with suppress(psutil.Error):
                    member.kill()
            left = {member.pid for member in members if _lives(member)}
            if not left or time.monotonic() > end:
                break
            time.sleep(_LOOK_AT_FAMILY)
        if new := left - self._stuck:
            self._stuck |= new
            logger().warning("processes of the run cannot be ended", processes=sorted(new))

    def pause(self) -> None:
        """Send SIGSTOP to all, and to those that they start meanwhile."""
        paused: set[int] = set()
        while new := [m for m in self._members() if m.pid not in paused]:
            for member in new:
                paused.add(member.pid)
                with suppress(psutil.Error):
                    member.suspend()

    def go_on(self) -> None:
        for member in self._members():
            with suppress(psutil.Error):
                member.resume()

    def reap(self, ranks: Collection[int]) -> None:
        """Wait for orphans that have ended, as no other code does."""
        with suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = found.si_pid
                if pid in ranks or pid == self._server() or not self._is_ours(pid):
                    return  # other code waits for it
                os.waitpid(pid, os.WNOHANG)

    def _heads(self) -> Iterator[psutil.Process]:
        """The ranks' top processes, and the orphans."""
        for child in psutil.Process().children():
            if child.pid == self._server():
                with suppress(psutil.Error):
                    yield from child.children()
            elif self._is_ours(child.pid):
                yield child

    def _members(self) -> list[psutil.Process]:
        return [member for head in self._heads() for member in (head, *_below(head))]

    def _is_ours(self, pid: int) -> bool:
        session = _session_of(pid)
        if session is None or session in self._others:
            return False
        return os.getpid() != 1 or _has_launch(pid)


def _has_launch(pid: int) -> bool:
    """Whether a process has the environment of a rank or of the fork server."""
    try:
        environ = psutil.Process(pid).environ()
        return FORK_SERVER in environ or Launch.from_environment(environ) is not None
    except (psutil.Error, KeyError, ValueError):
        return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _session_of(pid: int) -> int | None:
    """The session of a process; None if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


_LOOK = 0.2
"""Seconds between two checks that the program in a wrapper has ended."""


class Children:
    """The ranks that this process has started, each in a session of its own. A stop or kill reaches
    all descendants of a rank, which may be a wrapper around the program."""

    def __init__(self) -> None:
        self._server: ForkServerClient | None = None
        self._family = Family(lambda: None if self._server is None else self._server.pid)
        self._started: dict[int, StartedProcess] = {}
        self._killed: set[int] = set()
        self._asked, self._over = threading.Event(), threading.Event()
        self._informed: Collection[int] = ()
        self._signalled = False
        self._watchers: list[threading.Thread] = []

    def prepare(self, program: Program) -> None:
        """Start the imports, in a fork server. Call in the main thread."""
        if not program.modules:
            return
        if self._server is None:
            self._server = ForkServerClient(program.modules)
        self._server.start()

    def start(self, child: ChildRank, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start a rank and follow it on a thread, which posts its end."""
        follow = partial(self._follow, child, program, post)
        self._watchers.append(start_thread("rank", follow))

    def pid(self, rank: int) -> int | None:
        """The process id of a rank; None if it was not started."""
        child = self._started.get(rank)
        return None if child is None else child.pid

    def pids(self) -> dict[int, int]:
        """The process ids of the running ranks, by rank."""
        started = list(self._started.items())
        return {rank: child.pid for rank, child in started if child.poll() is None}

    def ask_to_stop(self, informed: Collection[int] = ()) -> None:
        """Send SIGTERM to every running rank, and to the program in a wrapper; not to the processes
        in `informed`, which know of the stop."""
        self._informed = informed
        self._asked.set()
        self._cancel_forks()
        self._family.ask_to_stop(informed)

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def signal(self, number: signal.Signals) -> None:
        """Send another signal to every running rank."""
        self._signalled = True
        for child in list(self._started.values()):
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to every running rank and its descendants, and wait for their end, at most
        `KILL_TIME`. A process that is stuck in the kernel is logged, and ends once the kernel
        releases it."""
        self._over.set()
        self._cancel_forks()
        for rank, child in list(self._started.items()):
            if child.poll() is None:
                self._killed.add(rank)
        self._family.kill()
        self._family.reap(self._tops)

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """Suspend the ranks in this block; yields whether this process may be suspended, too."""
        self._family.pause()
        try:
            yield True
        finally:
            self._family.go_on()

    def alive(self) -> bool:
        """Whether the end of any rank has not been posted."""
        if not self._watchers:
            return False  # without ranks, an orphan could be of a hook, for which other code waits
        self._family.reap(self._tops)
        return any(watcher.is_alive() for watcher in self._watchers)

    def forget(self, within: float) -> bool:
        """Forget the ranks that have ended; False if one still runs after `within` seconds."""
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
        """The process ids of the ranks (or of wrappers around them)."""
        return {child.pid for child in list(self._started.values())}

    def _cancel_forks(self) -> None:
        if self._server is not None:
            self._server.cancel_forks()

    def _follow(self, child: ChildRank, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start a rank and post its end. The thread lives as long as the rank, since a parent-death
        signal (prctl(2)) comes when the thread that started the child ends.

        A wrapper that our SIGTERM ends leaves the program behind, which may still have to commit:
        then the rank's end is that of the program."""
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
        printed, killed = output.end(), rank in self._killed
        words = "" if killed or status is None else find_last_words(printed, status)
        post(RankExit(rank, status, ended_by_us=killed, sentence=words, asked=asked))

    def _spawn(
        self, child: ChildRank, program: Program
    ) -> tuple[StartedProcess | None, RankOutput]:
        """Start the process of a rank, forked if possible, and its output; None for the process if
        a stop or kill came first. Raises `OSError` if it cannot be started."""
        output, started = RankOutput(child, program.pattern), None
        try:
            with output.pipe():
                output.begin()
                started = self._begin(child, program, output)
            return started, output
        finally:
            if started is None:
                output.end()

    def _begin(
        self, child: ChildRank, program: Program, output: RankOutput
    ) -> StartedProcess | None:
        """As `_spawn`, with its output open."""
        started: StartedProcess | None = None
        if self._server is not None and program.modules:
            try:
                outputs = (*output.writing, *output.reading)
                started = self._server.fork(
                    program.command, child.environ, outputs, program.ours, child.cpus
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
                stdout=output.writing[0],
                stderr=output.writing[1],
                pass_fds=output.reading,
            )
        self._started[child.rank] = started
        if self._over.is_set():  # since the check above
            self._killed.add(child.rank)
            self._family.kill()
        elif self._asked.is_set():
            self._family.ask_to_stop(self._informed)
        return started
