"""Connections that carry lines: over TCP between nodes, over a Unix socket within one."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from kempner.run.link.messages import LINE_LIMIT, Message, MessageError, encode
from kempner.run.process.exit_codes import UsageError

BACKLOG_LIMIT = 256 * 1024
"""Bytes that may wait for a slow reader; with more, the connection is given up."""

_CHUNK = 64 * 1024

UNACKNOWLEDGED = 10.0
"""Seconds without an acknowledgement after which the kernel gives a connection up, as when the
machine has lost power. While a process is only stopped or stuck, its kernel still answers, and the
connection stays."""

PATIENCE = 2.0
"""Seconds that each step of opening a connection may take."""

AFTER_REFUSAL = 0.5
"""The same for each further address once one has refused: as a rule the listener is gone."""

_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNACKNOWLEDGED)),
)


class HungUpError(ConnectionResetError):
    """The other side has closed the connection, or its process has ended; never a network fault."""


class Lines:
    """Splits a stream of bytes into lines, and keeps an incomplete last line."""

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self.limit = limit
        """Longest line in bytes, its newline included; may be raised between two `feed`s."""
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The lines that are complete now, without their newlines.

        Raises `MessageError` as soon as a line is longer than the limit, complete or not.
        """
        *lines, self._rest = (self._rest + received).split(b"\n")
        if max(map(len, [*lines, self._rest])) >= self.limit:
            raise MessageError(f"a line exceeds {self.limit} bytes")
        return lines


class Connection:
    """A connection that carries lines, and never waits for the other side, except in
    `wait_for_line`.

    Every method raises `OSError` if the connection was closed, is broken, or was given up because
    its reader is too slow.
    """

    def __init__(self, connection: socket.socket, limit: int = LINE_LIMIT) -> None:
        connection.setblocking(False)
        for level, option, value in _OPTIONS if connection.family != socket.AF_UNIX else ():
            connection.setsockopt(level, option, value)
        self._connection, self._lines = connection, Lines(limit)
        self._unsent = bytearray()
        self._unread: deque[bytes] = deque()

    def fileno(self) -> int:

        return self._connection.fileno()

    @property
    def closed(self) -> bool:
        """Whether it was closed here."""
        return self._connection.fileno() < 0

    @property
    def sending(self) -> bool:
        """Whether something waits for the other side to read."""
        return bool(self._unsent)

    def trust(self, limit: int = LINE_LIMIT) -> None:
        """Accept longer lines, as the caller has authenticated."""
        self._lines.limit = limit

    def send(self, message: Message) -> None:
        """Send now, or as soon as the other side reads. Raises `MessageError` if it is too long."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """As `send`; the line has its newline."""
        self._unsent += line
        self.flush()
        if len(self._unsent) > BACKLOG_LIMIT:
            raise TimeoutError("it does not read its messages")

    def flush(self) -> None:
        """Send as much as the kernel takes."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass  # the rest is sent when the selector says so

    def lines(self) -> list[bytes]:
        """The lines received. Raises `MessageError` if one is too long."""
        if self._unread:
            lines = list(self._unread)
            self._unread.clear()
            return lines
        try:
            received = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return []
        if not received:
            raise HungUpError("closed by the other side")
        return self._lines.feed(received)

    def wait_for_line(self, seconds: float) -> bytes:
        """The next line; the one method that waits. Raises `TimeoutError` after `seconds`."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while not self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"it has sent nothing for {seconds:g} s")
                self._unread.extend(self.lines())
        return self._unread.popleft()

    def release(self) -> socket.socket:
        """The socket itself, for bytes that are no lines. Nothing must be left to send or read."""
        return self._connection

    def close(self) -> None:
        """Close the connection; what was not sent is lost."""
        self._connection.close()


def connect(addresses: Sequence[str], port: int) -> socket.socket:
    """Connect to the first address that accepts: only trying shows which networks connect two
    nodes. Raises `OSError`; `ConnectionRefusedError` if one of them refused."""
    failure: OSError | None = None
    for address in addresses:
        refused = isinstance(failure, ConnectionRefusedError)
        within = AFTER_REFUSAL if refused else PATIENCE
        try:
            connection = socket.create_connection((address, port), timeout=within)
        except OSError as error:
            failure = failure if refused else error
            continue
        connection.settimeout(PATIENCE)
        return connection
    assert failure is not None  # a listener names one address at least
    raise failure


_TRIES = 8
"""A port that the kernel chose for one address may be taken on another."""


def listen(addresses: Sequence[str], ports: range | None) -> list[socket.socket]:
    """A listening socket on each address, all on the first port of `ports` that is free (None:
    any).

    Raises `UsageError` if there is none.
    """
    refused = None
    for port in ports if ports is not None else (0,) * _TRIES:
        try:
            return _listen(addresses, port)
        except OSError as error:
            refused = error.strerror
    where = " and ".join(addresses)
    where = f"{where}, ports {ports.start} to {ports.stop - 1}" if ports else where
    raise UsageError(
        f"the supervisor cannot listen on {where} ({refused}); "
        "set supervise.control_ports to a range with a free port"
    )


def _listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    with ExitStack() as opened:
        for address in addresses:
            listeners.append(socket.create_server((address, port), backlog=1024))
            opened.enter_context(listeners[-1])
            port = int(listeners[-1].getsockname()[1])
        opened.pop_all()
    return listeners


def listen_here(name: str) -> socket.socket:
    """A Unix socket in the abstract namespace (unix(7)): it needs no file, and only processes on
    this machine reach it. Raises `OSError` if the name is taken."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def connect_here(name: str) -> socket.socket:
    """Connect to the Unix socket of that name (`listen_here`). Raises `OSError`."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(PATIENCE)
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection
