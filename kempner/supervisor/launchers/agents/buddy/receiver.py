"""Takes in the copies that the agents of other nodes send to this one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kempner.checkpoint.slots.memory import CopyHolder
from kempner.cluster.network.interfaces import choose, read_interfaces, route_address
from kempner.run.control.handshake import admit
from kempner.run.control.protocol import OPENING_LIMIT, MessageError, Secret
from kempner.run.control.transport import Connection
from kempner.run.output.logs import logger
from kempner.run.process.threads import keep_running, start_thread
from kempner.supervisor.launchers.agents.buddy.wire import (
    ARRIVED,
    SILENT,
    receive_header,
    receive_image,
)

PENDING_LIMIT = 64
"""Connections that may be opening at once."""


class CopyReceiver:
    """Listens once it is asked where; each connection has a thread."""

    def __init__(self, copies: CopyHolder, secret: Secret, supervisor: Sequence[str]) -> None:
        self._copies, self._secret, self._supervisor = copies, secret, supervisor
        self._listener: socket.socket | None = None
        self._opening = threading.Semaphore(PENDING_LIMIT)
        self._lock = threading.Lock()
        self._streams: dict[int, socket.socket] = {}
        self._turns: dict[int, threading.Lock] = {}

    def listen(self, interface: str) -> tuple[str, int]:
        """Where it listens from now on: on the interface that the ranks use, too, which is the one
        that is named or the best. Raises `OSError`."""
        with self._lock:
            if self._listener is None:
                self._listener = socket.create_server(
                    (_address(self._supervisor, interface), 0), backlog=1024
                )
                keep_running("copies", partial(self._accept, self._listener))
        address, port = self._listener.getsockname()[:2]
        return address, port

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            if self._opening.acquire(blocking=False):
                start_thread("copies", partial(self._serve, connection))
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Until the connection is over."""
        with connection:
            try:
                try:
                    rank = admit(Connection(connection, OPENING_LIMIT), self._secret)
                finally:
                    self._opening.release()
                connection.settimeout(None)  # a rank may pin nothing for long
                with self._turn(rank, connection):
                    while self._take_in(connection):
                        pass
            except (OSError, MessageError) as error:
                logger().info("a connection that brings copies is over", reason=str(error))

    def _turn(self, rank: int, connection: socket.socket) -> threading.Lock:
        """The lock for writing a rank's copies: a new connection takes it from the one before."""
        with self._lock:
            before, self._streams[rank] = self._streams.get(rank), connection
            turn = self._turns.setdefault(rank, threading.Lock())
        if before is not None:
            with suppress(OSError):  # it may be over already
                before.shutdown(socket.SHUT_RDWR)
        return turn

    def _take_in(self, connection: socket.socket) -> bool:
        """One copy; False if the other side has nothing more to send."""
        connection.settimeout(None)
        if (incoming := receive_header(connection)) is None:
            return False
        connection.settimeout(SILENT)
        memory = self._copies.take(incoming.held)
        answer = receive_image(connection, memory, incoming.held.image)
        if answer == ARRIVED:
            self._copies.publish(memory, incoming.held, incoming.notes)
        connection.sendall(answer)
        return True


def _address(supervisor: Sequence[str], interface: str) -> str:
    """This node's address on the interface that its ranks would use; at last the one from which it
    reaches the supervisor."""
    route = next(filter(None, map(route_address, supervisor)), "")
    try:
        choice = choose(
            read_interfaces(),
            on_one_node=False,
            configured=interface or None,
            environ=os.environ,
            route_address=route,
        )
    except ValueError as error:
        raise OSError(0, str(error)) from error
    if choice.interface is None:
        return route
    return choice.interface.address.partition("/")[0]
