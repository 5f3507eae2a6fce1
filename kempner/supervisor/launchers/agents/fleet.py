"""The supervisor's side of the links to its agents: which are connected, their orders and answers.

Also the steps that agents hold in memory, and the pairs of nodes that keep copies for each other.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol, TypeAlias

from kempner.checkpoint.slots.pour import Offer, Poured
from kempner.checkpoint.slots.requests import listening, offers_of, poured_by
from kempner.run.control.launch_env import BuddyTerms
from kempner.run.control.protocol import RankNews, SummedReports, TellRanks
from kempner.run.link.auth import AGENTS, Door, Secret
from kempner.run.link.messages import RELAY_LIMIT, Alive, Caller, Joins, Message, MessageError, Role
from kempner.run.link.server import LinkServer
from kempner.run.output.logs import logger
from kempner.supervisor.launchers.agents.messages import (
    ActivityReport,
    AgentHello,
    Answer,
    AttemptCleared,
    Buddy,
    DepartureRequest,
    Ended,
    FromAgent,
    GpuReport,
    KillRanks,
    LeaveOrder,
    Question,
    ToAgent,
    decode_from_agent,
)

DISMISSED_WITHIN = 2.0
"""Seconds for agents to read the last message."""


@dataclass(frozen=True)
class AgentConnected:
    """An agent has connected, perhaps again. `step` and `task` say which one it is, `joins` what it
    offers if it is of another job."""

    step: int
    task: int
    pid: int
    joins: Joins | None = None


@dataclass(frozen=True)
class AgentDisconnected:
    """The link of an agent is broken; with `hung_up` its process has probably ended."""

    reason: str
    hung_up: bool


AgentNews = AgentConnected | AgentDisconnected | FromAgent


class AgentServer:
    """Listens for agents. Calls `hear` from its thread with each node and its news; what that
    returns for `AgentConnected` is sent to the agent first. `refusal` returns why an agent of
    another job cannot join, or an empty text."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: Secret,
        nodes: int,
        hear: Callable[[str, AgentNews], list[ToAgent]],
        refusal: Callable[[AgentHello], str],
    ) -> None:
        self._size, self._hear, self._refuses = nodes, hear, refusal
        self._steps: dict[str, int] = {}
        self._server: LinkServer[str, FromAgent] = LinkServer(
            listeners,
            Door(secret, AGENTS),
            self,
            decode_from_agent,
            nodes,
            "agents",
            limit=RELAY_LIMIT,
        )
        self._server.start()

    @property
    def port(self) -> int:
        return self._server.port

    def tell(self, node: str | None, message: ToAgent) -> None:
        """Send to the agent of a node, if connected, or to all (None); from any thread, without
        waiting. Does nothing after `close`."""
        self._server.tell(message, node)

    def close(self) -> None:
        """Order all agents to leave, and close."""
        self._server.close(DISMISSED_WITHIN, LeaveOrder())

    def admit(self, caller: Caller) -> tuple[str | None, Sequence[Message]]:
        """Accept an agent, unless it cannot join or an agent of a later step has replaced it."""
        node, step, guest = caller.host, caller.group, caller.role is Role.GUEST
        if guest is (caller.joins is None):
            raise MessageError(f"it calls as {caller.role}, and joins={caller.joins}")
        if not guest and caller.member >= self._size:
            raise MessageError(f"it claims to be task {caller.member} of {self._size}")
        if guest and (refusal := self._refuses(AgentHello(node, caller.pid, caller.joins))):
            return None, (LeaveOrder(refusal),)
        if self._steps.get(node, step) > step:
            return None, (LeaveOrder(),)
        self._steps[node] = step
        news = AgentConnected(step, caller.member, caller.pid, caller.joins)
        return node, self._hear(node, news)

    def hear(self, node: str, message: FromAgent) -> None:
        self._hear(node, message)

    def disconnected(self, node: str, why: Exception) -> None:
        del self._steps[node]
        # A process that ends with unread data resets its connection, which is an error, too.
        self._hear(node, AgentDisconnected(str(why), isinstance(why, ConnectionError)))

    def tick(self) -> None:
        """Send `Alive`, which agents pass on to their ranks."""
        self._server.say_alive(Alive())


SILENT = 6.0
"""Seconds without a message after which an agent is not waited for."""

Hear: TypeAlias = Callable[[str, AgentNews], list[ToAgent]]


class ServesAgents(Protocol):
    """Sends messages to agents, as `AgentServer`."""

    @property
    def port(self) -> int: ...

    def tell(self, node: str | None, message: ToAgent) -> None: ...

    def close(self) -> None: ...


Serve: TypeAlias = Callable[[Secret, Hear], ServesAgents]

FleetNews: TypeAlias = (
    AgentConnected
    | AgentDisconnected
    | Ended
    | ActivityReport
    | GpuReport
    | DepartureRequest
    | RankNews
    | SummedReports
)

_LOOK = 0.2
"""Seconds between two checks whether an answer can still be expected."""


@dataclass
class AgentSeen:
    """The last known state of an agent; times by `time.monotonic`. `cleared` is the last attempt
    whose processes on the node are all gone."""

    step: int
    task: int
    pid: int
    linked: bool = True
    heard_at: float = field(default_factory=time.monotonic)
    went_at: float = 0.0
    hung_up: bool = False
    cleared: int = 0


class Fleet:
    """The agents of some nodes. Calls `hear`, from the server's thread, with all that agents send
    except signs of life and answers. `refusal` as in `AgentServer`; `serve` replaces that server
    for an agent in this process."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        nodes: int,
        hear: Callable[[str, FleetNews], None],
        refusal: Callable[[AgentHello], str] = lambda hello: "",
        serve: Serve | None = None,
    ) -> None:
        self.secret = Secret.new()
        self._tell_of = hear
        self._changed = threading.Condition()
        self.seen: dict[str, AgentSeen] = {}
        """The last known state of each node's agent."""
        self._standing: dict[str, list[ToAgent]] = defaultdict(list)
        self._standing_messages: list[tuple[TellRanks, float]] = []
        self._pending: dict[int, Mapping[str, Question]] = {}
        self._answers: dict[int, dict[str, Answer]] = {}
        self._numbers = count(1)
        self._server: ServesAgents
        if serve is None:
            self._server = AgentServer(listeners, self.secret, nodes, self._hear, refusal)
        else:
            self._server = serve(self.secret, self._hear)

    @property
    def port(self) -> int:
        """The port on which agents connect."""
        return self._server.port

    def order(self, node: str, message: ToAgent) -> None:
        """Send an order to an agent now or when it connects, and again whenever it reconnects."""
        with self._changed:
            if isinstance(message, KillRanks):
                self._standing[node].clear()  # a new agent need not start anything first
            self._standing[node].append(message)
        self._server.tell(node, message)

    def tell_ranks(self, message: TellRanks, node: str | None) -> None:
        """Have the agent of a node, or all (None), pass this on to its ranks; a message that
        `stands` also agents that connect later."""
        if message.stands:
            with self._changed:
                self._standing_messages.append((message, time.monotonic()))
        self._server.tell(node, message)

    def dismiss(self, node: str) -> None:
        """Order the agent of a node to leave, if it is connected."""
        self._server.tell(node, LeaveOrder())

    def forget_orders(self) -> None:
        """Send no earlier order again."""
        with self._changed:
            self._standing.clear()
            self._standing_messages.clear()

    def ask(
        self,
        asked: Mapping[str, Question],
        within: float,
        hopeless: Callable[[str], bool],
    ) -> dict[str, Answer]:
        """Ask the agents of these nodes; the answers that came `within` seconds. Nodes for which
        `hopeless` is True are not waited for. From any thread."""
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
        """Wait until `condition` returns True; False if that takes longer than `within` seconds."""
        end = time.monotonic() + within
        with self._changed:
            while not condition():
                if time.monotonic() > end:
                    return False
                self._changed.wait(_LOOK)
        return True

    def close(self) -> None:
        """Order all agents to leave."""
        self._server.close()

    def _hear(self, node: str, news: AgentNews) -> list[ToAgent]:
        orders = list[ToAgent]()
        with self._changed:
            if isinstance(news, AgentConnected):
                orders = self._welcome(node, news)
            elif (seen := self.seen.get(node)) is not None:
                seen.heard_at = time.monotonic()
                match news:
                    case AgentDisconnected(reason, hung_up):
                        seen.linked, seen.hung_up, seen.went_at = False, hung_up, seen.heard_at
                        logger().info("link to an agent is over", node=node, reason=reason)
                    case AttemptCleared(clean=True):
                        seen.cleared = max(seen.cleared, news.attempt)
                    case Answer(number) if number in self._answers:
                        self._answers[number][node] = news
            self._changed.notify_all()
        if isinstance(news, FleetNews):
            self._tell_of(node, news)
        return orders

    def _welcome(self, node: str, news: AgentConnected) -> list[ToAgent]:
        before = self.seen.get(node)
        seen = AgentSeen(news.step, news.task, news.pid)
        if before is not None and before.pid == news.pid and before.step == news.step:
            seen.cleared = before.cleared
        elif news.joins is not None:
            self._standing[node].clear()  # orders for an agent that is gone
        self.seen[node] = seen
        logger().info("agent connected", node=node, step=news.step, pid=news.pid)
        asked = [questions[node] for questions in self._pending.values() if node in questions]
        now = time.monotonic()
        messages = [message.aged(now - sent_at) for message, sent_at in self._standing_messages]
        return [*self._standing[node], *messages, *asked]


class AskAgents(Protocol):
    """Sends request texts to nodes and returns their replies by node: those that arrive soon or, if
    `patient`, those of all nodes that can still reply."""

    def __call__(self, texts: Mapping[str, str], patient: bool) -> Mapping[str, str]: ...


class AgentSlots:
    """Asks agents for the steps that they hold in memory."""

    def __init__(self, ask: AskAgents) -> None:
        self._now, self._patiently = partial(ask, patient=False), partial(ask, patient=True)
        self._offered: dict[str, tuple[Offer, ...]] = {}

    def pair(self, nodes: Sequence[str], terms: BuddyTerms | None) -> dict[str, Buddy]:
        """The buddy of each node; empty if there cannot be one for each."""
        if terms is None:
            return {}
        if len(nodes) < 2:
            logger().info("no copies of steps in memory: there is no other node")
            return {}
        try:
            found = listening(self._now, nodes, terms.interface or "")
        except OSError as error:
            logger().warning("no copies of steps in memory", reason=error.strerror)
            return {}
        if unresponsive := [node for node in nodes if node not in found]:
            logger().warning(
                "no copies of steps in memory: agents do not answer", nodes=unresponsive
            )
            return {}
        pairs = buddies(nodes)
        logger().info("nodes keep copies of each other's steps", pairs=pairs)
        return {node: Buddy(buddy, *found[buddy], terms.share) for node, buddy in pairs.items()}

    def offers(self, nodes: Collection[str], nonce: str) -> list[Offer]:
        """The steps that these nodes hold of the attempt with this nonce. Raises `OSError`."""
        self._offered = offers_of(self._now, nodes, nonce)
        return [offer for offers in self._offered.values() for offer in offers]

    def pour(self, nonce: str, step: int, folder: Path) -> list[Poured]:
        """Have the nodes write their parts of a step into `folder`. Raises `OSError`."""
        return poured_by(self._patiently, self._offered, nonce, step, folder)


def buddies(nodes: Sequence[str]) -> Mapping[str, str]:
    """The node that keeps copies for each node: one far away in Slurm's order, where neighbours
    often share a switch or a power supply."""
    half = len(nodes) // 2
    return {node: nodes[(at + half) % len(nodes)] for at, node in enumerate(nodes)}
