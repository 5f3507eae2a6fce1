"""The fork server: a process that has imported everything, and forks ranks.

    python -m kempner.supervisor.launchers.fork_server.server DESCRIPTOR MODULE...

A forked rank need not import torch, which takes seconds of CPU time per rank and thousands of file
operations on a shared file system. The server itself computes nothing: a fork copies only the
calling thread, so a lock that another thread held would stay locked for ever. (After one backward
pass in the server, both of two children hung.) It refuses to fork if its process has other threads
or has opened a GPU; then the rank is started as a new process.

It ends when its client is gone. Client and server exchange messages over a socket pair of type
SOCK_SEQPACKET (unix(7)), one packet each. An order carries the descriptors for the rank's output.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

from kempner.run.output.console import say
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import STOP_SIGNALS, follow_parent, signal_at_end_of
from kempner.run.process.threads import once_there_is_room
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.supervisor.launchers.rank_network import enter_network

LARGEST = 1 << 20
"""Bytes of a message at most; the kernel may allow fewer."""


@dataclass(frozen=True)
class ForkOrder:
    """To the server: fork a process that runs `python ARGUMENTS...` in this environment.

    A program that is `ours` has stop signals blocked until it traps them; any other gets SIGTERM
    when the server's parent ends. `cpus` are those that it may use (empty: all of the server's).
    """

    number: int
    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    ours: bool
    cpus: tuple[int, ...] = ()
    kind: ClassVar[str] = "order"


@dataclass(frozen=True)
class ServerReady:
    kind: ClassVar[str] = "ready"


@dataclass(frozen=True)
class ProcessForked:
    """From the server: this process was forked. An `orphan` has become a child of the server's
    parent, which waits for it itself."""

    number: int
    pid: int
    orphan: bool = False
    kind: ClassVar[str] = "forked"


@dataclass(frozen=True)
class ForkRefused:
    """From the server: an order was refused, because a fork would not be safe."""

    number: int
    reason: str
    kind: ClassVar[str] = "refused"


@dataclass(frozen=True)
class ProcessEnded:
    """From the server: a process has ended, with an exit code or minus the signal."""

    pid: int
    status: int
    kind: ClassVar[str] = "ended"


Message: TypeAlias = ForkOrder | ServerReady | ProcessForked | ForkRefused | ProcessEnded

_KINDS = {
    kind.kind: kind for kind in (ForkOrder, ServerReady, ProcessForked, ForkRefused, ProcessEnded)
}


def encode(message: Message) -> bytes:
    """The packet of a message. Undecodable bytes in names and values are kept (surrogateescape)."""
    return json.dumps({"kind": message.kind, **asdict(message)}).encode()


def decode(packet: bytes) -> Message:
    """The message in a packet; the other side is trusted."""
    fields = json.loads(packet)
    for name in {"arguments", "cpus"} & fields.keys():
        fields[name] = tuple(fields[name])
    return _KINDS[fields.pop("kind")](**fields)


def arguments_of_python(command: Sequence[str]) -> tuple[str, ...] | None:
    """The arguments after `python`, if a fork can run the command, else None.

    It can run `python -m MODULE ...` and `python FILE.py ...` of this interpreter, without other
    options, which take effect only when an interpreter starts."""
    if len(command) < 2 or not _is_this_python(command[0]):
        return None
    safely = tuple(command[1:3]) == SAFE_MODULE  # these options the server has, too
    words = tuple(command[2 if safely else 1 :])
    if words[0] == "-m" and len(words) > 1:
        return words
    return words if words[0].endswith(".py") else None


def _is_this_python(word: str) -> bool:
    if word in ("python", "python3"):
        bin_folder = Path(sys.executable).parent
        first = next((f for f in os.get_exec_path() if (Path(f) / word).exists()), None)
        return first is not None and Path(first).resolve() == bin_folder.resolve()
    return Path(word) == Path(sys.executable)


_PR_SET_NAME = 15  # linux/prctl.h

_LAST = f"{Path.cwd()}/."
"""In `sys.path` during the imports, which may be modules of the user. Last, since a file there may
shadow a standard module."""

_MOST = 4
"""Descriptors with an order, at most."""

_LOOK = 0.001
"""Seconds between two checks that an orphan has its new parent."""


class ForkServer:
    """Forks on order, and reports how its children end."""

    def __init__(self, channel: socket.socket, parent: int) -> None:
        self._channel, self._parent = channel, parent
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._children: dict[int, int] = {}
        """Process ids, by their pidfd (pidfd_open(2))."""

    def serve(self) -> ForkOrder | None:
        """Carry out orders. Returns in each child, with its order, and in the server with None when
        the client is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._children:
                    self._report_end(key.fd)
                    continue
                packet, outputs, *_ = socket.recv_fds(self._channel, LARGEST, _MOST)
                if not packet:
                    return None
                order = decode(packet)
                assert isinstance(order, ForkOrder)
                if self._fork(order, outputs):
                    return order

    def _fork(self, order: ForkOrder, outputs: Sequence[int]) -> bool:
        """Carry out an order; True in the child."""
        if why := why_not_to_fork():
            self._say(ForkRefused(order.number, why))
        else:
            if not order.ours:
                return self._fork_orphan(order, outputs)
            pid = once_there_is_room(os.fork)  # an error would end this server and its ranks
            if not pid:
                self._become_child(outputs)
                return True
            ended = os.pidfd_open(pid)
            self._children[ended] = pid
            self._selector.register(ended, selectors.EVENT_READ)
            self._say(ProcessForked(order.number, pid))
        for output in outputs:
            os.close(output)
        return False

    def _fork_orphan(self, order: ForkOrder, outputs: Sequence[int]) -> bool:
        """As `_fork`; the new process becomes a child of this one's parent, a sub-reaper.

        So it gets its parent-death signal only when the supervisor is gone, not when this server
        is: a program that saves on SIGTERM and exits with 0 would then be taken for complete."""
        between = once_there_is_room(os.fork)
        if not between:
            between = os.getpid()  # known to the child even when this process is gone
            pid = once_there_is_room(os.fork)
            if pid:
                self._say(ProcessForked(order.number, pid, orphan=True))
                os._exit(0)
            self._become_child(outputs)
            while os.getppid() == between:
                time.sleep(_LOOK)
            follow_parent(self._parent, signal.SIGTERM)
            return True
        os.waitpid(between, 0)
        for output in outputs:
            os.close(output)
        return False

    def _become_child(self, outputs: Sequence[int]) -> None:
        """Close what is the server's, and redirect the output."""
        os.setsid()
        self._selector.close()
        self._channel.close()
        for ended in self._children:
            os.close(ended)
        for number, output in zip((1, 2), outputs, strict=False):  # further ones stay open
            os.dup2(output, number)
            os.close(output)

    def _report_end(self, ended: int) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        pid = self._children.pop(ended)
        _, status = os.waitpid(pid, 0)
        self._say(ProcessEnded(pid, os.waitstatus_to_exitcode(status)))

    def _say(self, message: Message) -> None:
        with suppress(OSError):  # the next read of the channel notices it
            self._channel.send(encode(message))


def why_not_to_fork(process: Path = Path("/proc/self")) -> str:
    """Why a fork of this process would not be safe: other threads, or an open GPU; empty if it
    is."""
    threads = len(list((process / "task").iterdir()))
    if threads > 1:
        return f"{threads} threads run in the fork server"
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):  # the descriptor of this listing
            file = str(descriptor.readlink())
            if file.startswith("/dev/nvidia"):
                return f"the fork server has opened {file}"
    return ""


def set_name(name: str) -> None:
    """Set the name that `top` shows: forked processes all share the server's command line."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def run(order: ForkOrder) -> None:
    """Run the program of an order, as if Python had just been started with it."""
    os.environ.clear()
    os.environ.update(order.environ)
    set_name(f"rank {order.environ.get('RANK', '')}".rstrip())
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    if not order.ours:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            enter_network()
        except (OSError, ValueError) as error:
            say(f"kempner: {order.arguments[0]} cannot be started: {error}", sys.stderr)
            sys.exit(ExitCode.USAGE)
    if "numpy" in sys.modules:  # ranks must not draw the same numbers; `random` reseeds itself
        sys.modules["numpy"].random.seed()
    gc.enable()
    program, *rest = order.arguments
    sys.path.remove(_LAST)
    if program == "-m":
        sys.argv = rest
        if not order.ours:
            sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(order.arguments)
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Import `modules`, and serve the client at the other end of a socket."""
    parent = os.getppid()
    if not signal_at_end_of(parent, signal.SIGKILL):
        return
    set_name("fork server")
    channel = socket.socket(fileno=descriptor)
    gc.disable()
    sys.path.append(_LAST)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # else a collection in a child would write to, and so copy, every shared page
    with suppress(OSError):  # the client is gone, as `serve` notices
        channel.send(encode(ServerReady()))
    order = ForkServer(channel, parent).serve()
    if order is not None:
        run(order)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
