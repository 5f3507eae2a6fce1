"""Transport of messages: over TCP, or through files where no connection is possible."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from pathlib import Path

from kempner.run.control.protocol import LINE_LIMIT, FromRank, FromSupervisor, Lines, encode
from kempner.run.process.durable_io import append_line

BACKLOG_LIMIT = 256 * 1024
"""Bytes that may wait for a reader that is slow; then the connection is given up."""

_CHUNK = 64 * 1024

UNACKNOWLEDGED = 10.0
"""Seconds without an acknowledgement after which the kernel gives a connection up. A machine that
has lost its power says nothing. A process that is stopped or stuck is another matter: its kernel
goes on answering, and the connection stays."""

_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNACKNOWLEDGED)),
)


class HungUpError(ConnectionResetError):
    """The other side has closed the connection, or its process has ended: no cut does that."""


class Connection:
    """A connection that carries lines, and never waits for the other side.

    Every method raises `OSError` if the connection is over, be it closed, broken, or given up
    because its reader is too slow.
    """

    def __init__(self, connection: socket.socket, limit: int = LINE_LIMIT) -> None:
        connection.setblocking(False)
        for level, option, value in _OPTIONS:
            connection.setsockopt(level, option, value)
        self._connection, self._lines = connection, Lines(limit)
        self._unsent = bytearray()
        self._unread: deque[bytes] = deque()

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    @property
    def closed(self) -> bool:
        """Whether it was closed here."""
        return self._connection.fileno() < 0

    @property
    def sending(self) -> bool:
        """Whether something waits for the other side to read."""
        return bool(self._unsent)

    def trust(self) -> None:
        """Let lines be as long as the protocol allows."""
        self._lines.limit = LINE_LIMIT

    def send(self, message: FromRank | FromSupervisor) -> None:
        """Send, now or as soon as the other side reads. Raises `MessageError` if it is too long."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """As `send`; the line has its newline."""
        self._unsent += line
        self.flush()
        if len(self._unsent) > BACKLOG_LIMIT:
            raise TimeoutError("it does not read its messages")

    def flush(self) -> None:
        """Send as much of what waits as the kernel takes."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass  # the rest goes when the selector says so

    def lines(self) -> list[bytes]:
        """The lines that have come. Raises `MessageError` if one is too long."""
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


class MessageFile:
    """A file to which one side appends messages and which the other reads.

    Opened anew for every look and every line, which is what makes a network file system show what
    is new. A process that can write it can write the run's directory, and is trusted as much.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines, self._position = Lines(), 0

    def append(self, message: FromRank | FromSupervisor) -> None:
        """Add a message. Raises `OSError`."""
        append_line(self._path, encode(message).decode().removesuffix("\n"))

    def news(self) -> list[bytes]:
        """The lines since the last look; none if there is no file. Raises `OSError`."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                added = file.read()
        except FileNotFoundError:
            return []
        self._position += len(added)
        return [line for line in self._lines.feed(added) if line]
