"""All that the ranks of an attempt have started on this machine, to signal it and to end it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

import psutil

from kempner.run.control.launch_env import FORK_SERVER, Launch
from kempner.run.control.leftovers import processes_to_signal
from kempner.run.output.logs import logger

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

KILL_TIME = 2.0
"""Seconds in which a process that was killed is gone, unless it is stuck in the kernel."""

_LOOK = 0.01
"""Seconds between two looks whether they are gone."""


class Family:
    """The ranks and their descendants, those included that have lost their parents.

    A process whose parent ends becomes the child of this one, its sub-reaper (prctl(2)). So even a
    daemon in a session of its own is found: the ranks' sessions are not this process's, and no
    process can enter this process's session from another one. Only the first process of a container
    gets orphans that it has not started; there the ranks' environment tells them apart.

    A fork server, whose process id `server` returns, is not a member, but all of its children are.
    """

    def __init__(self, server: Callable[[], int | None] = lambda: None) -> None:
        self._server = server
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            logger().warning("a process that leaves its parent may outlive the run", reason=reason)
        self._others = {session for session in map(_session, _children(recursive=True)) if session}
        self._others.add(os.getsid(0))
        self._stopping: list[psutil.Process] = []
        self._stuck: set[int] = set()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to each process that can act on it.

        A process that traps the signal ends its children itself: without the workers of its data
        loader, say, its last step would fail. One that does not trap it, such as a shell that runs
        a script, ends and leaves its children: they get the signal as well.
        """
        asked = [found for head in self._heads() for found in processes_to_signal(head)]
        # First, since another thread looks at `stops` as soon as a wrapper has ended.
        self._stopping += [process for process, traps in asked if traps]
        for process, _ in asked:
            with suppress(psutil.Error):
                process.terminate()

    def stops(self) -> bool:
        """Whether any that was asked, and traps the signal, has not ended yet."""
        return any(_lives(process) for process in self._stopping)

    def kill(self) -> None:
        """SIGKILL all of them, and those that they start meanwhile.

        A process that is not gone after `KILL_TIME` is stuck in the kernel, or another user's, and
        is logged once.
        """
        end = time.monotonic() + KILL_TIME
        while True:
            members = self._members()
            for member in members:
                with suppress(psutil.Error):
                    member.kill()
            left = {member.pid for member in members if _lives(member)}
            if not left or time.monotonic() > end:
                break
            time.sleep(_LOOK)
        if new := left - self._stuck:
            self._stuck |= new
            logger().warning("processes of the run cannot be ended", processes=sorted(new))

    def pause(self) -> None:
        """Stop all of them where they are, and those that they start meanwhile."""
        paused: set[int] = set()
        while new := [m for m in self._members() if m.pid not in paused]:
            for member in new:
                paused.add(member.pid)
                with suppress(psutil.Error):
                    member.suspend()

    def go_on(self) -> None:
        """Let all of them go on."""
        for member in self._members():
            with suppress(psutil.Error):
                member.resume()

    def reap(self, ranks: Collection[int]) -> None:
        """Read the exit statuses of orphans, for which no other code waits."""
        with suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = found.si_pid
                if pid in ranks or pid == self._server() or not self._is_ours(pid):
                    return  # other code waits for it
                os.waitpid(pid, os.WNOHANG)

    def _heads(self) -> Iterator[psutil.Process]:
        """The ranks' top processes and the orphans."""
        for child in _children():
            if child.pid == self._server():
                with suppress(psutil.Error):
                    yield from child.children()
            elif self._is_ours(child.pid):
                yield child

    def _members(self) -> list[psutil.Process]:
        """All processes of the family."""
        return [member for head in self._heads() for member in (head, *_below(head))]

    def _is_ours(self, pid: int) -> bool:
        session = _session_of(pid)
        if session is None or session in self._others:
            return False
        return os.getpid() != 1 or _has_launch(pid)


def _has_launch(pid: int) -> bool:
    """Whether a process was started, or forked, with what the supervisor tells its ranks."""
    try:
        environ = psutil.Process(pid).environ()
        return FORK_SERVER in environ or Launch.from_environment(environ) is not None
    except (psutil.Error, KeyError, ValueError):
        return False


def _children(recursive: bool = False) -> list[psutil.Process]:
    return psutil.Process().children(recursive)


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


def _session(process: psutil.Process) -> int | None:
    return _session_of(process.pid)


def _session_of(pid: int) -> int | None:
    """None if it has just gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
