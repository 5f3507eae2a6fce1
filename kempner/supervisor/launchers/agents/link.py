"""An agent's link to the supervisor: opened again whenever it breaks."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

from kempner.run.control.handshake import open_wire
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import MessageError
from kempner.run.control.transport import Connection
from kempner.run.output.logs import logger
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.process.threads import keep_running
from kempner.supervisor.launchers.agents.messages import (
    BEAT,
    AgentConfirmation,
    AgentHeartbeat,
    AgentHello,
    FromAgent,
    Numbered,
    ToAgent,
    decode_to_agent,
    encode,
)

AGAIN = 0.2
"""Seconds between two tries to connect."""


class AgentLink:
    """Talks to the supervisor from a thread, which calls `hear` with each message, and `hello` for
    the first message of each connection.

    What is numbered is sent again over each new connection, until it is confirmed.
    """

    def __init__(
        self,
        launch: Launch,
        task: int,
        hello: Callable[[], AgentHello],
        hear: Callable[[ToAgent], None],
    ) -> None:
        self._launch, self._task, self._hello, self._hear = launch, task, hello, hear
        self._lock = threading.Lock()
        self._added = 0
        self._unheard: deque[Numbered] = deque()
        self._unsent: deque[FromAgent] = deque()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._clock, self._alone_since = AwakeClock(), 0.0
        self._connected = False

    def start(self) -> None:
        """Connect, and begin to listen."""
        keep_running("link", self._serve)

    def alone_for(self) -> float:
        """Seconds for which there has been no connection, of those that this process was awake."""
        now = self._clock.now()
        if self._connected:
            self._alone_since = now
        return now - self._alone_since

    def say(self, message: FromAgent) -> None:
        """Send a message, or drop it if there is no connection."""
        with self._lock:
            self._unsent.append(message)
        os.eventfd_write(self._alarm, 1)

    def post(self, make: Callable[[int], Numbered]) -> None:
        """Send what `make` returns for its number; it is kept until it is confirmed."""
        with self._lock:
            self._added += 1
            message = make(self._added)
            self._unheard.append(message)
            self._unsent.append(message)
        os.eventfd_write(self._alarm, 1)

    def all_heard(self) -> bool:
        """Whether everything that must not be lost has arrived."""
        with self._lock:
            return not self._unheard

    def _serve(self) -> None:
        while True:
            try:
                wire = open_wire(self._launch, self._task)
            except (OSError, MessageError) as error:
                logger().debug("no connection to the supervisor", reason=str(error))
                time.sleep(AGAIN)
                continue
            try:
                self._talk(wire)
            except (OSError, MessageError) as error:
                logger().info("the connection to the supervisor is over", reason=str(error))
            finally:
                self._connected = False
                wire.close()

    def _talk(self, wire: Connection) -> None:
        """Until the connection is over, which raises."""
        wire.trust()
        with self._lock:
            self._unsent = deque(self._unheard)
        wire.send_line(encode(self._hello()))
        self._connected = True
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm, selectors.EVENT_READ)
            selector.register(wire, selectors.EVENT_READ)
            beat_at = time.monotonic()
            while True:
                self._send(wire)
                now = time.monotonic()
                if now >= beat_at:
                    wire.send_line(encode(AgentHeartbeat()))
                    beat_at = now + BEAT
                writes = selectors.EVENT_WRITE if wire.sending else 0
                selector.modify(wire, selectors.EVENT_READ | writes)
                for key, events in selector.select(beat_at - now):
                    if key.fd == self._alarm:
                        os.eventfd_read(self._alarm)
                    elif events & selectors.EVENT_READ:
                        for line in wire.lines():
                            self._take_in(decode_to_agent(line))

    def _send(self, wire: Connection) -> None:
        wire.flush()
        with self._lock:
            messages, self._unsent = list(self._unsent), deque()
        for message in messages:
            wire.send_line(encode(message))

    def _take_in(self, message: ToAgent) -> None:
        if not isinstance(message, AgentConfirmation):
            self._hear(message)
            return
        with self._lock:
            while self._unheard and self._unheard[0].number <= message.number:
                self._unheard.popleft()
