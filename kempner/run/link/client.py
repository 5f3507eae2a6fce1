"""The calling side of a link: one thread that keeps the connection, and the outbox.

It sends what is due, acts at once on what it receives, and reconnects whenever the connection
breaks. Posts are kept until the other side confirms them.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from kempner.run.link.messages import Message, MessageError, Noted, Post, encode
from kempner.run.link.wire import Connection
from kempner.run.output.logs import logger
from kempner.run.process.threads import AwakeClock, helper_thread, started

RETRY = (0.1, 2.0)
"""Seconds until the second try to connect, and the most between two tries."""

Heard = TypeVar("Heard", bound=Message, contravariant=True)


class SilenceClock:
    """Counts the seconds since the other side was last heard, except while suspended."""

    def __init__(self, limit: float) -> None:
        self._limit, self._clock = limit, AwakeClock()
        self._heard_at = 0.0
        self.noticed = False
        self.times_heard = 0
        self.refuses = False
        """Whether the port refused the last connection, though the machine answered."""

    @property
    def seconds(self) -> float:

        return self._clock.now() - self._heard_at

    def heard(self) -> None:

        self._heard_at, self.noticed, self.refuses = self._clock.now(), False, False
        self.times_heard += 1

    def exceeds_limit(self) -> bool:
        """Whether the limit is exceeded; True once for each silence."""
        if self.noticed or self.seconds < self._limit:
            return False
        self.noticed = True
        return True


class Outbox:
    """Numbered messages, oldest first: any thread adds some, one thread sends them. `decode` is the
    other side's decoder."""

    def __init__(self, decode: Callable[[bytes], object]) -> None:
        self._decode = decode
        self._unheard: deque[Post] = deque()
        self._added = 0
        self._changed = threading.Condition()

    def add(self, make: Callable[[int], Post]) -> None:
        """Add what `make` returns for its number.

        A message that the other side would refuse (too long, say) is dropped with a warning: it
        would break each new connection. Raises `TypeError` if a field is no JSON value.
        """
        with self._changed:
            message = make(self._added + 1)
            try:
                self._decode(encode(message))
            except MessageError as error:
                kind = type(message).__name__
                logger().warning("a message is left out", kind=kind, reason=str(error))
                return
            self._added += 1
            self._unheard.append(message)

    def after(self, number: int) -> list[Post]:
        """The unconfirmed messages with greater numbers."""
        with self._changed:
            return [message for message in self._unheard if message.number > number]

    def heard(self, number: int) -> None:
        """The other side has everything up to this number."""
        with self._changed:
            while self._unheard and self._unheard[0].number <= number:
                self._unheard.popleft()
            self._changed.notify_all()

    def drop(self, gone: Iterable[Post]) -> None:
        """Remove these: the caller delivers them in another way."""
        numbers = {message.number for message in gone}
        with self._changed:
            self._unheard = deque(m for m in self._unheard if m.number not in numbers)

    def wait_until_heard(self, seconds: float) -> list[Post]:
        """Wait until all is confirmed, at most `seconds`; returns what is not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unheard, seconds)
            return list(self._unheard)


class CallerOwner(Protocol[Heard]):
    """Callbacks of the calling side's owner. Called from the link's thread, and must not wait."""

    def hear(self, message: Heard) -> None:
        """Take in a message of the other side."""

    def opened(self) -> None:
        """Called for each new connection, before anything is sent."""

    def due(self, behind: bool) -> Iterable[Message]:
        """Messages to send now that may get lost; the other side may be `behind` in reading."""

    def next_at(self, connected: bool) -> float:
        """When something is due, or a deadline has to be checked (`time.monotonic`, seconds)."""

    def look(self, connected: bool) -> None:
        """Check the deadlines; called after each wait."""


class LinkClient(Generic[Heard]):
    """The connection to a listener. No method fails because it is down.

    `dial` opens a connection, `decode` decodes the listener's messages, `outbox` holds what must
    not be lost, `silence` counts how long the listener has been silent.
    """

    def __init__(
        self,
        dial: Callable[[], Connection],
        decode: Callable[[bytes], Heard],
        owner: CallerOwner[Heard],
        outbox: Outbox,
        silence: SilenceClock,
        retry: tuple[float, float] = RETRY,
    ) -> None:
        self._dial, self._decode, self._owner, self._retry = dial, decode, owner, retry
        self.outbox, self.silence = outbox, silence
        self._messages: deque[Message] = deque()
        self._over = False
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.alone_since: float | None = time.monotonic()
        """Since when there is no connection; None while there is one."""

    def start(self) -> None:
        """Begin to connect, in the background."""
        started(helper_thread(self._keep, "link"))

    def say(self, message: Message) -> None:
        """Send a message; it is lost if there is no connection."""
        self._messages.append(message)
        self._wake()

    def post(self, make: Callable[[int], Post]) -> None:
        """Send what `make` returns for its number, and keep it until it is confirmed."""
        self.outbox.add(make)
        self._wake()

    def close(self) -> None:
        """Disconnect. Returns at once."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._alarm, 1)

    def _keep(self) -> None:
        """The thread: connect, talk until the connection breaks, repeat."""
        pause, longest = self._retry
        while not self._over:
            try:
                wire = self._dial()
            except (OSError, MessageError) as error:
                self.silence.refuses = isinstance(error, ConnectionRefusedError)
                logger().debug("cannot connect to the supervisor", reason=str(error))
                self._wait_alone(pause)
                pause = min(2 * pause, longest)
                continue
            pause, _ = self._retry
            try:
                self._talk(wire)
            except (OSError, MessageError) as error:
                logger().info("lost the connection to the supervisor", reason=str(error))
            finally:
                wire.close()
                self.alone_since = time.monotonic()
            self._wait_alone(pause)

    def _talk(self, wire: Connection) -> None:
        """Exchange messages until the connection breaks, which raises, or `close` is called."""
        self.silence.heard()  # it has just proved who it is
        self._messages.clear()
        self._owner.opened()
        self.alone_since = None
        sent = 0  # what was sent and never confirmed is sent again
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm, selectors.EVENT_READ)
            selector.register(wire, selectors.EVENT_READ)
            while not self._over:
                for line in wire.lines():
                    self._hear(line)
                sent = self._speak(wire, sent)
                self._owner.look(True)
                writing = selectors.EVENT_WRITE if wire.sending else 0
                selector.modify(wire, selectors.EVENT_READ | writing)
                self._wait_for_work(selector, self._owner.next_at(True))

    def _hear(self, line: bytes) -> None:
        message = self._decode(line)
        self.silence.heard()
        if isinstance(message, Noted):
            self.outbox.heard(message.number)
        else:
            self._owner.hear(message)

    def _speak(self, wire: Connection, sent: int) -> int:
        """Send what is due. `sent` is the last post sent before; returns the last one sent now."""
        wire.flush()
        # While the reader is behind, only what must not be lost.
        for message in self._owner.due(wire.sending):
            wire.send(message)
        while self._messages:
            wire.send(self._messages.popleft())
        for post in self.outbox.after(sent):
            wire.send(post)
            sent = post.number
        return sent

    def _wait_alone(self, seconds: float) -> None:
        """Wait until it is time to try again."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm, selectors.EVENT_READ)
            again_at = time.monotonic() + seconds
            self._wait_for_work(selector, min(again_at, self._owner.next_at(False)))
        self._owner.look(False)

    def _wait_for_work(self, selector: selectors.BaseSelector, until: float) -> None:
        """Wait until something happens, or until it is time for something."""
        selector.select(max(0.0, until - time.monotonic()))
        with suppress(BlockingIOError):
            os.eventfd_read(self._alarm)
