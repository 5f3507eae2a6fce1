"""The agents of all nodes: which are connected, their orders, and their answers."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeAlias

from kempner.run.control.protocol import Secret
from kempner.run.output.logs import logger
from kempner.supervisor.launchers.agents.messages import (
    AgentHeartbeat,
    AgentHello,
    Answer,
    AttemptCleared,
    DepartureRequest,
    Ended,
    KillRanks,
    LeaveOrder,
    Question,
    ToAgent,
)
from kempner.supervisor.launchers.agents.server import (
    AgentConnected,
    AgentDisconnected,
    AgentNews,
    AgentServer,
)

SILENT = 6.0
"""Seconds without a sign of life after which an agent is not waited for."""

NO_OTHERS = "this run takes no nodes of other jobs (supervise.grow=false)"

FleetNews: TypeAlias = AgentConnected | Ended | DepartureRequest

_LOOK = 0.2
"""Seconds between two looks whether an agent can still be expected to answer."""


@dataclass
class AgentSeen:
    """What was last seen of an agent; times by `time.monotonic`.

    `cleared` is the last attempt of which nothing is left there.
    """

    step: int
    task: int
    pid: int
    linked: bool = True
    heard_at: float = field(default_factory=time.monotonic)
    went_at: float = 0.0
    hung_up: bool = False
    cleared: int = 0

    @property
    def well(self) -> bool:
        """Whether it has sent a message recently."""
        return self.linked and time.monotonic() - self.heard_at < SILENT


class Fleet:
    """Talks to the agents of some nodes. `hear` is called with all that an agent says but signs of
    life and answers, from the server's thread; `refusal` says why one of another job cannot join.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        nodes: int,
        hear: Callable[[str, FleetNews], None],
        refusal: Callable[[AgentHello], str] = lambda hello: NO_OTHERS,
    ) -> None:
        self.secret = Secret.new()
        self._tell_of = hear
        self._changed = threading.Condition()
        self._seen: dict[str, AgentSeen] = {}
        self._standing: dict[str, list[ToAgent]] = defaultdict(list)
        self._pending: dict[int, Mapping[str, Question]] = {}
        self._answers: dict[int, dict[str, Answer]] = {}
        self._numbers = count(1)
        self._server = AgentServer(listeners, self.secret, nodes, self._hear, refusal)

    @property
    def port(self) -> int:
        """Where agents are listened to."""
        return self._server.port

    def seen(self, node: str) -> AgentSeen | None:
        """What was last seen of a node's agent."""
        return self._seen.get(node)

    def order(self, node: str, message: ToAgent) -> None:
        """Tell an agent, now or when it comes, and again whenever it comes back."""
        with self._changed:
            if isinstance(message, KillRanks):
                self._standing[node].clear()  # a later agent need not start anything first
            self._standing[node].append(message)
        self._server.tell(node, message)

    def dismiss(self, node: str) -> None:
        """Send the agent of a node away, if there is one."""
        self._server.tell(node, LeaveOrder())

    def forget_orders(self) -> None:
        """What was ordered is done."""
        with self._changed:
            self._standing.clear()

    def ask(
        self,
        asked: Mapping[str, Question],
        within: float,
        hopeless: Callable[[str], bool],
    ) -> dict[str, Answer]:
        """Ask the agents of these nodes; the answers that came in time.

        Nodes that are `hopeless` are not waited for. From any thread.
        """
        number = next(self._numbers)
        questions = {node: replace(question, number=number) for node, question in asked.items()}
        end = time.monotonic() + within
        with self._changed:
            self._pending[number], self._answers[number] = questions, {}
        for node, question in questions.items():
            self._server.tell(node, question)
        with self._changed:
            answers = self._answers[number]
            while not all(map(hopeless, questions.keys() - answers.keys())):
                if (left := end - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, _LOOK))
            del self._pending[number], self._answers[number]
            return dict(answers)

    def wait_until(self, condition: Callable[[], bool], within: float) -> bool:
        """Wait until something is so, with or without news of agents; whether it is."""
        end = time.monotonic() + within
        with self._changed:
            while not condition():
                if time.monotonic() > end:
                    return False
                self._changed.wait(_LOOK)
        return True

    def close(self) -> None:
        """Send all agents away."""
        self._server.close()

    def _hear(self, node: str, news: AgentNews) -> list[ToAgent]:
        with self._changed:
            orders = self._take_in(node, news)
            self._changed.notify_all()
        if isinstance(news, AgentConnected | Ended | DepartureRequest):
            self._tell_of(node, news)
        return orders

    def _take_in(self, node: str, news: AgentNews) -> list[ToAgent]:
        if isinstance(news, AgentConnected):
            return self._welcome(node, news)
        if (seen := self._seen.get(node)) is None:
            return []
        match news:
            case AgentDisconnected(reason, hung_up):
                seen.linked, seen.hung_up, seen.went_at = False, hung_up, time.monotonic()
                logger().info("link to an agent is over", node=node, reason=reason)
                return []
            case AttemptCleared():
                seen.cleared = max(seen.cleared, news.attempt) if news.clean else seen.cleared
            case Answer(number) if number in self._answers:
                self._answers[number][node] = news
            case AgentHeartbeat():
                pass
        seen.heard_at = time.monotonic()
        return []

    def _welcome(self, node: str, news: AgentConnected) -> list[ToAgent]:
        before = self._seen.get(node)
        seen = AgentSeen(news.step, news.task, news.pid)
        if before is not None and before.pid == news.pid and before.step == news.step:
            seen.cleared = before.cleared
        elif news.joins is not None:
            self._standing[node].clear()  # it was told to the agent before, which is gone
        self._seen[node] = seen
        logger().info("agent connected", node=node, step=news.step, pid=news.pid)
        asked = [questions[node] for questions in self._pending.values() if node in questions]
        return [*self._standing[node], *asked]
