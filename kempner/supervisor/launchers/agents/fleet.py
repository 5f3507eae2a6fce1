"""The supervisor's side of the links to its agents, for as long as it lives: which are connected,
their orders, and their answers.

The steps that agents hold in memory, and the pairs of nodes that keep copies for each other.
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
    AgentHello,
    Answer,
    AttemptCleared,
    Buddy,
    DepartureRequest,
    Ended,
    FromAgent,
    GpuTold,
    KillRanks,
    LeaveOrder,
    Question,
    RanksStill,
    ToAgent,
    decode_from_agent,
)

DISMISSED_WITHIN = 2.0
"""Seconds that agents get to take in the last message."""


@dataclass(frozen=True)
class AgentConnected:
    """An agent has connected, perhaps again: its step, its task there, its process; what it brings
    if it is of another job."""

    step: int
    task: int
    pid: int
    joins: Joins | None = None


@dataclass(frozen=True)
class AgentDisconnected:
    """The link of an agent is over; `hung_up` says that its process has ended, as a rule."""

    reason: str
    hung_up: bool


AgentNews = AgentConnected | AgentDisconnected | FromAgent


class AgentServer:
    """Listens to agents. `hear` is called from its thread with a node and what is new of it.

    What `hear` returns for an agent that came is said to it first. `refusal` says why one of
    another job cannot join, if so.
    """

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
        """Send to the agent of a node, if there is one, or to all; from any thread, without
        waiting. Does nothing after `close`."""
        self._server.tell(message, node)

    def close(self) -> None:
        """Send all agents away, and hang up."""
        self._server.close(DISMISSED_WITHIN, LeaveOrder())

    def admit(self, caller: Caller) -> tuple[str | None, Sequence[Message]]:
        """Take in an agent, unless it cannot join, or was given up and has a successor."""
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
        """Hand it on."""
        self._hear(node, message)

    def disconnected(self, node: str, why: Exception) -> None:
        """An agent that lives is back at once."""
        del self._steps[node]
        # Reset, if it had not read everything.
        self._hear(node, AgentDisconnected(str(why), isinstance(why, ConnectionError)))

    def tick(self) -> None:
        """Send a sign of life, which agents pass on to their ranks."""
        self._server.say_alive(Alive())


SILENT = 6.0
"""Seconds without a sign of life after which an agent is not waited for."""

Hear: TypeAlias = Callable[[str, AgentNews], list[ToAgent]]


class ServesAgents(Protocol):
    """Carries messages to agents, and theirs to a fleet."""

    @property
    def port(self) -> int: ...

    def tell(self, node: str | None, message: ToAgent) -> None: ...

    def close(self) -> None: ...


Serve: TypeAlias = Callable[[Secret, Hear], ServesAgents]

FleetNews: TypeAlias = (
    AgentConnected
    | AgentDisconnected
    | Ended
    | RanksStill
    | GpuTold
    | DepartureRequest
    | RankNews
    | SummedReports
)

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


class Fleet:
    """Talks to the agents of some nodes. `hear` is called with all that an agent says but signs of
    life and answers, from the server's thread; `refusal` says why one of another job cannot join.
    `serve` is for an agent in this process.
    """

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
        """What was last seen of a node's agent."""
        self._standing: dict[str, list[ToAgent]] = defaultdict(list)
        self._told_ranks: list[tuple[TellRanks, float]] = []
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
        """Where agents are listened to."""
        return self._server.port

    def order(self, node: str, message: ToAgent) -> None:
        """Tell an agent, now or when it comes, and again whenever it comes back."""
        with self._changed:
            if isinstance(message, KillRanks):
                self._standing[node].clear()  # a later agent need not start anything first
            self._standing[node].append(message)
        self._server.tell(node, message)

    def tell_ranks(self, message: TellRanks, node: str | None) -> None:
        """Have the agent of a node, or all, pass this on; what stands also those that come later,
        or again."""
        if message.stands:
            with self._changed:
                self._told_ranks.append((message, time.monotonic()))
        self._server.tell(node, message)

    def dismiss(self, node: str) -> None:
        """Send the agent of a node away, if there is one."""
        self._server.tell(node, LeaveOrder())

    def forget_orders(self) -> None:
        """What was ordered is done."""
        with self._changed:
            self._standing.clear()
            self._told_ranks.clear()

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
            self._standing[node].clear()  # it was told to the agent before, which is gone
        self.seen[node] = seen
        logger().info("agent connected", node=node, step=news.step, pid=news.pid)
        asked = [questions[node] for questions in self._pending.values() if node in questions]
        now = time.monotonic()
        told = [message.aged(now - told_at) for message, told_at in self._told_ranks]
        return [*self._standing[node], *told, *asked]


class AskAgents(Protocol):
    """Sends requests to nodes and returns their replies, as texts by node: those that arrive soon,
    or, if `patient`, those of all nodes that can still reply."""

    def __call__(self, texts: Mapping[str, str], patient: bool) -> Mapping[str, str]: ...


class SlotsAway:
    """Asks agents for what they hold."""

    def __init__(self, ask: AskAgents) -> None:
        self._now, self._patiently = partial(ask, patient=False), partial(ask, patient=True)
        self._offered: dict[str, tuple[Offer, ...]] = {}

    def pair(self, nodes: Sequence[str], terms: BuddyTerms | None) -> dict[str, Buddy]:
        """The buddy of each node; none for all where one of them has none."""
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
        """What these nodes offer. Raises `OSError`."""
        self._offered = offers_of(self._now, nodes, nonce)
        return [offer for told in self._offered.values() for offer in told]

    def pour(self, nonce: str, step: int, folder: Path) -> list[Poured]:
        """Have them write what they have offered of a step. Raises `OSError`."""
        return poured_by(self._patiently, self._offered, nonce, step, folder)


def buddies(nodes: Sequence[str]) -> Mapping[str, str]:
    """The node that keeps copies for each node: one that is far off in Slurm's order, in which
    neighbours often share a switch or a power supply."""
    half = len(nodes) // 2
    return {node: nodes[(at + half) % len(nodes)] for at, node in enumerate(nodes)}
