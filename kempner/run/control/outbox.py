"""The outbox: messages that must not be lost, kept until the supervisor confirms them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from kempner.run.control.protocol import Event, MessageError, Outcome, decode_from_rank, encode
from kempner.run.output.logs import logger

Post: TypeAlias = Event | Outcome


class Outbox:
    """Numbered messages, oldest first, that any thread adds to and one thread sends."""

    def __init__(self) -> None:
        self._unheard: deque[Post] = deque()
        self._added = 0
        self._changed = threading.Condition()

    def add(self, make: Callable[[int], Post]) -> None:
        """Add what `make` returns for its number.

        One that the other side would refuse, too long, say, is left out with a warning: it would
        cost the connection, again and again. Raises `TypeError` if a field is no JSON value.
        """
        with self._changed:
            message = make(self._added + 1)
            try:
                decode_from_rank(encode(message))
            except MessageError as error:
                logger().warning("ledger event dropped", reason=str(error))
                return
            self._added += 1
            self._unheard.append(message)

    def after(self, number: int) -> list[Post]:
        """The messages with greater numbers that have not been heard."""
        with self._changed:
            return [message for message in self._unheard if message.number > number]

    def heard(self, number: int) -> None:
        """The supervisor has everything up to this number."""
        with self._changed:
            while self._unheard and self._unheard[0].number <= number:
                self._unheard.popleft()
            self._changed.notify_all()

    def drop(self, events: Iterable[Post]) -> None:
        """Forget the lines for the ledger among these: the caller writes them."""
        gone = {message.number for message in events if isinstance(message, Event)}
        with self._changed:
            self._unheard = deque(m for m in self._unheard if m.number not in gone)

    def wait_until_heard(self, seconds: float) -> list[Post]:
        """Wait, at most so long, until all is heard; returns what is not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unheard, seconds)
            return list(self._unheard)
