"""What ranks are told: at once those that are there, and later those that join."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from kempner.run.control.protocol import FromSupervisor, PeerLost, Stop


class Orders:
    """Messages that wait to be sent, and those that hold for the rest of the attempt."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[FromSupervisor, int | None]] = deque()
        self._standing: list[tuple[FromSupervisor, float]] = []

    def add(self, message: FromSupervisor, rank: int | None) -> None:
        """To be sent to a rank, or to all (None); may be called from any thread."""
        self._waiting.append((message, rank))

    def take(self) -> Iterator[tuple[FromSupervisor, int | None]]:
        """What is to be sent now, and to whom; a stop or a loss that all are told stands."""
        while self._waiting:
            message, rank = self._waiting.popleft()
            if rank is None and isinstance(message, Stop | PeerLost):
                self._standing.append((message, time.monotonic()))
            yield message, rank

    def so_far(self) -> list[FromSupervisor]:
        """What a rank that joins only now must know, a deadline as it is now."""
        now = time.monotonic()
        return [
            replace(message, seconds_left=max(0.0, message.seconds_left - (now - told_at)))
            if isinstance(message, Stop) and message.seconds_left is not None
            else message
            for message, told_at in self._standing
        ]
