"""What a fork of the template runs: program.py spare|brief|alone FOLDER STDOUT ARGUMENTS...

It becomes `python ARGUMENTS` in that folder; standard output goes to the end of that file, if one
is named. With `spare` it first forks a process for a supervisor to have as its first fork server:
that has imported everything already. What follows its death is the product's own. With `brief` it
leaves without the last part of an interpreter's end, which takes every module down: most of the CPU
time of a program of a few steps, as each page is then copied that the template's modules are in.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from kempner.run.control.launch_env import AS_FORKED
from kempner.run.process.signals import STOP_SIGNALS
from kempner.supervisor.launchers.fork_server import client, server
from kempner.supervisor.launchers.fork_server.server import LARGEST, ForkOrder


class Spare:
    """A child of this process, as a fork server's client has it.

    As with `subprocess.Popen`, the one that has ended is killed without a complaint: another thread
    waits for it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_spare() -> None:
    """Fork the process that the first fork server of this one will be, while nothing runs here.

    It is one for any modules that it has. In the child, this returns when that has become a rank
    which has ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    pid = os.fork()
    if not pid:
        os.setsid()
        ours.close()
        server.main(theirs.detach(), ())
        sys.exit()
    theirs.close()
    start = client._ServerProcess.start

    def adopt(modules: Sequence[str]) -> client._ServerProcess:
        client._ServerProcess.start = start  # type: ignore[method-assign]
        if sys.modules.keys() >= set(modules):
            return client._ServerProcess(Spare(pid), ours)  # type: ignore[arg-type]
        ours.close()  # which ends it
        os.waitpid(pid, 0)
        return start(modules)

    client._ServerProcess.start = adopt  # type: ignore[method-assign]


def main(kind: str, folder: str, stdout: str, *arguments: str) -> None:
    """Be the program, as if a user had just typed its command."""
    if stdout:
        file = os.open(stdout, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(file, 1)
        os.close(file)
    os.chdir(folder)
    sys.path[:1] = [str(Path.cwd())] if arguments[0] == "-m" else []
    sys.path.append(server._LAST)
    if kind == "spare":
        fork_spare()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    environ = {name: value for name, value in os.environ.items() if name not in AS_FORKED}
    run = partial(server.run, ForkOrder(0, arguments, environ, ours=True))
    if kind == "brief":
        run_briefly(run)
    run()


def run_briefly(run: Callable[[], None]) -> NoReturn:
    """Run a program, and end as an interpreter does up to where it takes its modules down; one that
    ends by an exception takes the ordinary way."""
    code = 0
    try:
        run()
    except SystemExit as leaves:
        if not isinstance(leaves.code or 0, int):
            raise
        code = int(leaves.code or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
