"""Connections to the supervisor: those of ranks, and those that have yet to say whose they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kempner.run.control.protocol import new_nonce
from kempner.run.control.transport import Connection
from kempner.run.output.logs import logger

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
