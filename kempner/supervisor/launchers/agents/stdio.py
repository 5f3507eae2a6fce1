"""Connects agents that cannot reach the supervisor's ports through the standard input and output of
srun, whose ports every site leaves open.

What such an agent prints goes to its standard error."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kempner.run.process.threads import start_thread

BY_SRUN = "KEMPNER_AGENTS_BY_SRUN"
"""Environment variable that tells an agent to use its standard input and output as its link."""

_HERE, _CHUNK = b"+", 65536


def offer_stdio() -> int:
    """Turn standard input and output into a local port that leads to the supervisor; the port. Call
    once, before any output."""
    inward, outward = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout.flush()
    os.dup2(2, 1)
    listener = socket.create_server(("127.0.0.1", 0))
    start_thread("link", partial(_offer, listener, inward, outward))
    return int(listener.getsockname()[1])


def _offer(listener: socket.socket, inward: int, outward: int) -> None:
    """Serve one connection: the supervisor's end cannot be opened again."""
    connection, _ = listener.accept()
    os.write(outward, _HERE)
    start_thread("from supervisor", partial(_copy, partial(os.read, inward), connection.sendall))
    _copy(connection.recv, partial(_write, outward))


def carry(srun: socket.socket, address: str, port: int) -> None:
    """Relay between the standard input and output of an srun and a port, from the first byte of its
    task until one side ends."""
    with srun, suppress(OSError):
        if srun.recv(len(_HERE)) == _HERE:
            with socket.create_connection((address, port)) as link:
                start_thread("to agent", partial(_copy, link.recv, srun.sendall))
                _copy(srun.recv, link.sendall)


def _write(target: int, chunk: bytes) -> None:
    left = memoryview(chunk)
    while left:
        left = left[os.write(target, left) :]


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
    with suppress(OSError):
        while chunk := read(_CHUNK):
            write(chunk)
