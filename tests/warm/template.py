"""The template of this worker, and the processes that were forked from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Protocol
from unittest import mock

from patience import scaled

from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.fork_server import client
from kempner.supervisor.launchers.fork_server.client import ForkedProcess, ForkServerClient
from kempner.supervisor.launchers.fork_server.server import arguments_of_python
from warm.slots import dear

PROGRAM = Path(__file__).with_name("program.py")

MODULES = (
    *Program.train(()).modules,
    "kempner.cli.app",
    "kempner.supervisor.daemon",
    "kempner.supervisor.launchers.local",
    "kempner.supervisor.readiness",
    "kempner.training.survive",
    "pytest",  # by what runs over ranks, as are the rest
    "unittest.mock",
)
"""What the template imports: whatever else a process needs, it imports by itself."""


ENVIRON = {"OMP_NUM_THREADS": "1", **os.environ}
"""Before the first test: the template is the same, whichever test needs it first."""


class Process(Protocol):
    """What the tests ask of a process, of which `subprocess.Popen` has it all."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


class Warm:
    """A process that was forked from the template: a `Process`."""

    def __init__(self, forked: ForkedProcess) -> None:
        self.pid = forked.pid
        self._ended: Future[int] = Future()
        threading.Thread(target=self._follow, args=(forked,), name="warm", daemon=True).start()

    def _follow(self, forked: ForkedProcess) -> None:
        status = forked.wait()
        if status is None:
            self._ended.set_exception(RuntimeError("the template died; only it knew the status"))
        else:
            self._ended.set_result(status)

    def poll(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)


class Template:
    """A fork server that is started when it is needed first, imports `modules`, and has the
    variables `environ` for that.

    This process is no sub-reaper: what a killed supervisor leaves behind is for the machine's first
    process, as it would be without us.
    """

    def __init__(
        self, modules: Sequence[str] = MODULES, environ: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        for limit in ("IMPORTED_WITHIN", "FORKED_WITHIN", "STATUS_WITHIN"):
            setattr(client, limit, scaled(getattr(client, limit)))
        self._server = ForkServerClient(modules)
        self._environ = {**ENVIRON, **environ}
        self._lock = threading.Lock()

    def fork(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        output: BinaryIO,
        cwd: Path | None = None,
        spare: bool = False,
        stdout: Path | None = None,
        brief: bool = False,
    ) -> Warm:
        """`python ARGUMENTS` in a session of its own; the rest is as in `start`. A `brief` one does
        not take its interpreter down."""
        kind = "spare" if spare else "brief" if brief else "alone"
        options = (kind, str(cwd or Path.cwd()), str(stdout or ""))
        command = (sys.executable, str(PROGRAM), *options, *arguments)
        fork = partial(self._server.fork, command, environ, (output.fileno(),) * 2, ours=True)
        with self._lock:
            if self._server.pid is None:
                with dear():
                    self._start()
                    return Warm(fork())
        return Warm(fork())

    def _start(self) -> None:
        """By a thread that lives as long as this process: the kernel ends a server with that.

        The caller may be the thread of a single test.
        """
        started = threading.Event()

        def live() -> None:
            try:
                with mock.patch.dict(os.environ, self._environ, clear=True):
                    self._server.start()
            finally:
                started.set()
            threading.Event().wait()

        threading.Thread(target=live, name="template", daemon=True).start()
        started.wait()


_TEMPLATE = Template()


ALL_COLD = os.environ.get("KEMPNER_TESTS_COLD") == "1"


class _Share:
    """Which share of the tests the present one belongs to."""

    cold = ALL_COLD


def choose(cold: bool) -> None:
    """From now on processes are started by their commands, or forked."""
    _Share.cold = cold or ALL_COLD


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    output: BinaryIO,
    cwd: Path | None = None,
    spare: bool = False,
    stdout: Path | None = None,
) -> Process:
    """A process of this command in a session of its own, which prints to `output`.

    It is forked, if it is one of Python and this is no `cold` test. If it is a supervisor that
    forks, it gets a `spare` process for that. `stdout` is a file for its standard output alone.
    """
    arguments = arguments_of_python(command)
    if arguments is not None and not _Share.cold:
        return _TEMPLATE.fork(arguments, environ, output, cwd, spare, stdout)
    with nullcontext(output) if stdout is None else open(stdout, "ab") as told:
        return subprocess.Popen(
            command,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=output,
            start_new_session=True,
        )


def complete(*command: object, deadline: float = 120.0) -> tuple[int, str]:
    """Start a command, and wait for its end: its exit code, and what it printed."""
    with tempfile.TemporaryFile() as output:
        process = start([str(word) for word in command], os.environ, output)
        try:
            code = process.wait(scaled(deadline))
        finally:
            process.send_signal(signal.SIGKILL)
        output.seek(0)
        return code, output.read().decode(errors="replace")
