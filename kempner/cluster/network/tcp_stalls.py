"""Finds TCP connections of this node that no longer deliver data."""

from __future__ import annotations

import errno
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_RETRIES = 2
"""Unsuccessful retransmissions that count as a stall; a single loss is common."""

ANSWER = 1.0
"""Seconds for a host to answer a connection attempt, which its kernel does however busy its
processes are."""
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)
"""Results that show that the host is alive, whether or not a process listens there."""


def dead_connections() -> list[tuple[str, str]]:
    """Local and remote address of each connection that delivers nothing: those with unacknowledged
    data, and idle ones whose host does not answer a new connection attempt. Raises `OSError` or
    `psutil.Error` if the kernel does not show the connections."""
    return sorted({*stalled_connections(), *unanswered_calls()})


def stalled_connections(tables: tuple[Path, ...] = _TABLES) -> list[tuple[str, str]]:
    """Local and remote address of each TCP connection whose data is not acknowledged, of all
    processes in this network namespace; needs no privileges. Raises `OSError` if the kernel does
    not show them."""
    return [ends for table in tables for ends in _stalled(table.read_text())]


def unanswered_calls(patience: float = ANSWER) -> list[tuple[str, str]]:
    """Local and remote address of each connection of this process whose host does not answer now.
    Connects only from the same address to the same port as an existing outgoing connection, which a
    firewall has let pass. Takes `patience` seconds if a host does not answer. Raises `psutil.Error`
    if the kernel does not show the connections."""
    connections = psutil.Process().net_connections(kind="tcp")
    own = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    called = {
        (_plain(c.laddr.ip), _plain(c.raddr.ip)): c.raddr.port
        for c in connections
        if c.status == psutil.CONN_ESTABLISHED and c.laddr.port not in own
    }
    return _unanswered(
        {ends: port for ends, port in called.items() if ends[0] != ends[1]}, patience
    )


def _unanswered(called: dict[tuple[str, str], int], patience: float) -> list[tuple[str, str]]:
    deadline, answered = time.monotonic() + patience, set()
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for ends, port in called.items():
            caller = stack.enter_context(socket.socket(_family(ends[0])))
            error = _call(caller, *ends, port)
            if error in _ANSWERS:
                answered.add(ends)
            elif error == errno.EINPROGRESS:
                selector.register(caller, selectors.EVENT_WRITE, ends)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)  # nothing else was registered
                selector.unregister(key.fileobj)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    answered.add(key.data)
    return sorted(called.keys() - answered)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _call(caller: socket.socket, near: str, far: str, port: int) -> int:
    """Start to connect; EINPROGRESS, or the error number."""
    caller.setblocking(False)
    try:
        caller.bind((near, 0))
    except OSError as error:  # the interface of this address is gone
        return error.errno or errno.EADDRNOTAVAIL
    return caller.connect_ex((far, port))


def _stalled(table: str) -> Iterator[tuple[str, str]]:
    """Stalled connections in the text of a table (proc(5)); `retrnsmt` counts timeouts since the
    last acknowledgement."""
    for line in table.splitlines()[1:]:
        _, near, far, _, _, _, retransmits, *_ = line.split()
        if int(retransmits, 16) >= _RETRIES:
            yield _address(near), _address(far)


def _address(end: str) -> str:
    """The address in `HEX:PORT`, which consists of four-byte words in host order."""
    digits = end.partition(":")[0]
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(packed) == 4:
        return str(IPv4Address(packed))
    return _plain(str(IPv6Address(packed)))


def _plain(address: str) -> str:
    """The address, converted to IPv4 if it is an IPv4-mapped IPv6 address."""
    parsed = ip_address(address)
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
