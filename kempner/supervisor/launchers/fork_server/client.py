"""Starts a fork server, has it fork processes, and reports how these end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Protocol

import psutil

from kempner.run.control.launch_env import AS_FORKED, FORK_SERVER
from kempner.run.output.logs import logger
from kempner.run.process.signals import stop_signals_blocked
from kempner.run.process.threads import start_thread
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.supervisor.launchers.fork_server import server
from kempner.supervisor.launchers.fork_server.server import (
    LARGEST,
    ForkOrder,
    ForkRefused,
    ProcessEnded,
    ProcessForked,
    ServerReady,
    arguments_of_python,
    decode,
    encode,
)

IMPORTED_WITHIN = 60.0
"""Seconds for the imports. If they take longer, the ranks import for themselves: they report that
phase, so the supervisor sees which node is slow."""

FORKED_WITHIN = 10.0
"""Seconds for a fork; it takes about 10 ms."""

STATUS_WITHIN = 2.0
"""Seconds after the end of a process within which the server reports its status, unless it is
stopped or stuck."""

_IMPORTS_ONLY = {
    "OPENBLAS_NUM_THREADS": "1",  # else numpy starts a thread per core, and no fork is safe
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else looking for a GPU makes later forks unusable
    FORK_SERVER: "1",
}
"""Environment of the server while it imports, not of the processes that it forks."""


class CannotForkError(Exception):
    """The order was not carried out, and will not be; the message is one sentence."""


class StartedProcess(Protocol):
    """A process that was forked, or started as by `subprocess.Popen`."""

    pid: int

    def wait(self) -> int | None:
        """Wait for its end; its exit code, or minus the signal; None if not known."""

    def poll(self) -> int | None:
        """As `wait`, but at once; None if it runs."""


class ForkedProcess:
    """A process that the server has forked. `end_server` is called if it has ended and the server
    does not report so. An `orphan` has become a child of this process."""

    def __init__(self, pid: int, end_server: Callable[[], None], orphan: bool) -> None:
        self.pid, self._end_server, self._orphan = pid, end_server, orphan
        self._status: Future[int | None] = Future()
        """As reported by the server; None if the server died first."""
        try:
            self._ended: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = None  # it has ended; the server reports its status

    def ended(self, status: int | None) -> None:
        """Set the status that the server has reported, or None if it will not."""
        if not self._status.done():
            self._status.set_result(status)

    def wait(self) -> int | None:
        """As `StartedProcess.wait`; call once."""
        if self._ended is not None:
            over = select.poll()
            over.register(self._ended, select.POLLIN)
            over.poll()
            os.close(self._ended)
        if self._orphan:
            self.ended(None)
        try:
            status = self._status.result(STATUS_WITHIN)
        except TimeoutError:
            self._end_server()
            status = self._status.result()
        if status is not None:
            return status
        # The server reports nothing: the process is, or has become, a child of this sub-reaper.
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None

    def poll(self) -> int | None:
        """As `StartedProcess.poll`; leaves an orphan's status for `wait`."""
        if not self._orphan:
            return self._status.result() if self._status.done() else None
        with suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            found = os.waitid(os.P_PID, self.pid, options)
            if found is None:
                return None
            exited = found.si_code == os.CLD_EXITED
            return found.si_status if exited else -found.si_status
        return None


class ForkServerClient:
    """A fork server that has imported `modules`; `start` also replaces one that has died. This
    process must be a sub-reaper (prctl(2)): if the server dies, its children live on as this
    process's."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._lock = threading.Lock()
        self._running: _ServerProcess | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id; None if there is none."""
        running = self._running
        return None if running is None or running.over else running.process.pid

    def start(self) -> None:
        """Start the server unless it runs. Call in the main thread: the server ends with the thread
        that started it. If it cannot be started, `fork` raises."""
        with self._lock:
            if self._running is None or self._running.over:
                try:
                    self._running = _ServerProcess.start(self._modules)
                except OSError as error:
                    logger().warning("cannot start a fork server", reason=error.strerror)

    def fork(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        outputs: Sequence[int],
        ours: bool,
        cpus: tuple[int, ...] = (),
    ) -> ForkedProcess:
        """Fork a process for this command, in a session of its own, after the imports.

        `outputs` are the descriptors of its standard output and error, and further ones that it
        holds; empty for the server's own. Raises `CannotForkError`; then nothing was started, or it
        was killed."""
        running, arguments = self._running, arguments_of_python(command)
        if arguments is None:
            raise CannotForkError("it is not a Python program")
        if running is None or running.over:
            raise CannotForkError("there is no fork server")
        return running.fork(
            partial(
                ForkOrder,
                arguments=arguments,
                environ={**environ, **AS_FORKED},
                ours=ours,
                cpus=cpus,
            ),
            outputs,
        )

    def cancel_forks(self) -> None:
        """Let all pending forks fail; processes that were forked go on."""
        if self._running is not None and self._running.waited_for:
            self._running.kill()

    def close(self) -> None:
        """End the server; processes that it has forked go on."""
        if self._running is not None:
            self._running.kill()


class _ServerProcess:
    """One server process, until it ends."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process, self.over = process, False
        self._channel, self._lock = channel, threading.Lock()
        self._numbers = count(1)
        self._ready: Future[None] = Future()
        self.waited_for: dict[int, Future[ForkedProcess]] = {}
        self._forked: dict[int, ForkedProcess] = {}
        start_thread("fork-server", self._listen)

    @classmethod
    def start(cls, modules: Sequence[str]) -> _ServerProcess:
        """Raises `OSError`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
            with stop_signals_blocked():
                process = subprocess.Popen(
                    [sys.executable, *SAFE_MODULE, server.__name__, str(theirs.fileno()), *modules],
                    env={**os.environ, **_IMPORTS_ONLY},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        return cls(process, ours)

    def fork(self, make: Callable[[int], ForkOrder], outputs: Sequence[int]) -> ForkedProcess:
        """Carry out the order that `make` returns for a number, as `ForkServerClient.fork`."""
        order = make(next(self._numbers))
        answer: Future[ForkedProcess] = Future()
        with self._lock:
            if self.over:
                raise CannotForkError("the fork server has ended")
            self.waited_for[order.number] = answer
        try:
            socket.send_fds(self._channel, [encode(order)], list(outputs))
            self._ready.result(IMPORTED_WITHIN)
            return answer.result(FORKED_WITHIN)
        except TimeoutError:
            # It may be suspended and carry out the order later, so it must not go on.
            self.kill()
            raise CannotForkError("the fork server does not answer") from None
        except OSError as error:
            raise CannotForkError(f"the order cannot be sent: {error.strerror}") from error
        finally:
            self.waited_for.pop(order.number, None)

    def kill(self) -> None:
        """End the server, and the children that it has forked but not reported."""
        with suppress(psutil.Error):
            found = psutil.Process(self.process.pid).children()
            self.process.kill()
            for child in found:
                if child.pid not in self._forked:
                    child.kill()

    def _listen(self) -> None:
        """Handle the server's messages until it ends."""
        with suppress(OSError):
            while packet := self._channel.recv(LARGEST):
                self._hear(packet)
        status = self.process.wait()
        with self._lock:
            self.over = True
            waiting, forked = list(self.waited_for.values()), list(self._forked.values())
        self._channel.close()
        logger().info("the fork server has ended", status=status)
        gone = CannotForkError("the fork server has ended")
        if not self._ready.done():
            self._ready.set_exception(gone)
        for answer in waiting:
            if not answer.done():
                answer.set_exception(gone)
        for process in forked:
            process.ended(None)

    def _hear(self, packet: bytes) -> None:
        match decode(packet):
            case ServerReady():
                self._ready.set_result(None)
            case ProcessForked(number, pid, orphan):
                forked = ForkedProcess(pid, self.kill, orphan)
                if not orphan:
                    self._forked[pid] = forked
                if (answer := self.waited_for.get(number)) is not None:
                    answer.set_result(forked)
                elif orphan:
                    os.kill(pid, signal.SIGKILL)  # the fork was cancelled meanwhile
            case ForkRefused(number, reason):
                if (answer := self.waited_for.get(number)) is not None:
                    answer.set_exception(CannotForkError(reason))
            case ProcessEnded(pid, status):
                self._forked.pop(pid).ended(status)
