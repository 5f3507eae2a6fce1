"""Connections to the supervisor: those of ranks, and those that have yet to say whose they are.

Where the supervisor listens, and how a rank authenticates.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kempner.run.control.protocol import PROTOCOL, Hello, Secret, new_nonce, same_proof
from kempner.run.control.transport import Connection
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError

OPENING_TIME = 10.0
"""Seconds within which a connection must have proved that it belongs to a rank."""

PENDING_LIMIT = 64
"""Connections beyond one per rank that may be at that stage; beyond it the oldest is closed."""

REFUSALS_LOGGED = 20
"""A port scanner must not fill the disk."""


@dataclass(eq=False)
class Peer:
    """A connection. It is a rank's once `rank` is set."""

    wire: Connection
    address: str
    opened_at: float
    nonce: str = field(default_factory=new_nonce)
    rank: int | None = None
    told_noted: int = 0


class UnprovedPeers:
    """Connections that have not proved yet that they belong to one of `size` ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[Peer, None] = {}  # a set in the order of the connections
        self._refusals = 0

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._waiting))

    def add(self, peer: Peer) -> None:
        """Take in a new connection."""
        self._waiting[peer] = None

    def remove(self, peer: Peer) -> None:
        """Forget a connection that is proved or closed."""
        del self._waiting[peer]

    def oldest_over_limit(self) -> Peer | None:
        """The connection that has to be closed before another is accepted; None below the limit."""
        full = len(self._waiting) >= self._size + PENDING_LIMIT
        return next(iter(self._waiting)) if full else None

    def overdue(self) -> list[Peer]:
        """Those that have not proved in time that they belong to a rank."""
        too_old = time.monotonic() - OPENING_TIME
        return [peer for peer in self._waiting if peer.opened_at < too_old]

    def refuse(self, peer: Peer, reason: str) -> None:
        """Log why its connection was closed, and forget it."""
        self.remove(peer)
        self._refusals += 1
        if self._refusals <= REFUSALS_LOGGED:
            logger().info("connection refused", address=peer.address, reason=reason)

    def sum_up(self) -> None:
        """Log how many were refused, if not each of them was."""
        if self._refusals > REFUSALS_LOGGED:
            logger().info("connections refused in all", count=self._refusals)


_TRIES = 8
"""A port that the kernel chose for one address may be taken on another."""


@dataclass(frozen=True)
class Membership:
    """Accepts the ranks of one attempt."""

    secret: Secret
    attempt: int
    size: int

    def refusal(self, hello: Hello, challenge: str) -> str | None:
        """Why a connection is not of a rank of this attempt; None if it is."""
        expected = self.secret.proof_of_rank(challenge, hello.nonce, hello.attempt, hello.rank)
        if hello.version != PROTOCOL:
            return f"it speaks version {hello.version} of the protocol, this is {PROTOCOL}"
        if not same_proof(hello.proof, expected):
            return "it does not know the token"
        if hello.attempt != self.attempt:
            return f"it belongs to attempt {hello.attempt}"
        if hello.rank >= self.size:
            return f"it claims to be rank {hello.rank} of {self.size}"
        return None


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
