"""Agent launcher: ranks are forked by an agent on each node of a Slurm job.

How long the supervisor waits for its agents.

The ranks that agents have started, and of which the supervisor awaits the end.

The steps that agents hold in memory, and the pairs of nodes that keep copies for each other.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

from kempner.checkpoint.slots.pour import Offer, Poured
from kempner.checkpoint.slots.requests import listening, offers_of, poured_by
from kempner.cluster.network.ports import choose_master
from kempner.cluster.slurm.allocation import Allocation
from kempner.cluster.slurm.command import SlurmError
from kempner.cluster.slurm.hostlist import node_name
from kempner.config.sections import SuperviseSection
from kempner.run.control.launch_env import BUDDY, BuddyTerms, Launch, without_token
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.threads import start_thread
from kempner.supervisor.control.peers import listen
from kempner.supervisor.launchers.agents import node_agent
from kempner.supervisor.launchers.agents.buddy.sender import Buddy
from kempner.supervisor.launchers.agents.fleet import NO_OTHERS, Fleet, FleetNews
from kempner.supervisor.launchers.agents.messages import (
    AgentHello,
    Answer,
    Ended,
    KillRanks,
    Question,
    StartRanks,
    StopRanks,
    seal,
)
from kempner.supervisor.launchers.agents.step import AgentStep, agent_environment
from kempner.supervisor.launchers.base import CannotRestart, Program
from kempner.supervisor.launchers.srun import DEAF, SrunLauncher
from kempner.supervisor.launchers.surroundings import Surroundings
from kempner.supervisor.nodes import srun_probe
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult, question_text, read_result
from kempner.supervisor.policy.outcome import RankExit

COME_WITHIN = 30.0
"""Seconds within which an agent connects: it starts in one, or where its container is open."""

ANSWER_WITHIN = 3.0
"""Seconds that agents get to say that they are there, before Slurm is asked about their nodes."""

CLEARED_WITHIN = 15.0
"""Seconds within which an agent has ended what is left of an attempt."""

SURVEYS = 2
"""Times that nodes are asked: agents may have died unnoticed, or with a step that Slurm aborted."""

DEAF_AFTER = 4.0
"""Seconds without the end of ranks that were to be killed after which their agent is killed."""

GIVEN_UP_WITHIN = 10.0
"""Seconds to wait until an agent that was killed, and all that Slurm kills with it, is gone."""

HUNG_UP = 3.0
"""Seconds after the end of an agent's process, seen by its link, in which srun may say how."""

AWAY = 45.0
"""Seconds after which an agent whose link broke off in any other way is not expected back."""

END_WITHIN, LOST_WITHIN = 10.0, 1.0
"""Seconds for srun to end when agents were sent away, and if it waits for a node that is gone."""


class RanksAway:
    """The ranks that were started on other nodes and have not been seen to end."""

    def __init__(self) -> None:
        self._left: dict[int, str] = {}
        self._post: Callable[[RankExit], None] = lambda end: None
        self._lock = threading.Lock()

    def begin(self, places: Mapping[str, Sequence[int]], post: Callable[[RankExit], None]) -> None:
        """These are started now, by node."""
        with self._lock:
            self._left = {rank: node for node, ranks in places.items() for rank in ranks}
            self._post = post

    def nodes(self) -> set[str]:
        """The nodes on which ranks are left."""
        with self._lock:
            return set(self._left.values())

    def end(self, end: RankExit) -> None:
        """Note that a rank has ended."""
        with self._lock:
            known = self._left.pop(end.rank, None) is not None
        if known:
            self._post(end)

    def lose(self, node: str, status: int | None, ended_by_us: bool) -> None:
        """All that are left on a node are gone."""
        with self._lock:
            lost = [rank for rank, where in self._left.items() if where == node]
        for rank in lost:
            self.end(RankExit(rank, status, ended_by_us))


class AskAgents(Protocol):
    """Sends requests to nodes and returns their replies, as texts by node: those that arrive soon,
    or, if `patient`, those of all nodes that can still reply."""

    def __call__(self, texts: Mapping[str, str], patient: bool) -> Mapping[str, str]: ...


class SlotsAway:
    """Asks agents for what they hold."""

    def __init__(self, ask: AskAgents) -> None:
        self._now, self._patiently = partial(ask, patient=False), partial(ask, patient=True)
        self._offered: dict[str, tuple[Offer, ...]] = {}

    def pair(self, nodes: Sequence[str], terms: BuddyTerms | None) -> dict[str, dict[str, str]]:
        """The variable that tells each node where its buddy listens; none for all where one of them
        has none."""
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
        return {
            node: {BUDDY: Buddy(*found[buddy], terms.share).text} for node, buddy in pairs.items()
        }

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


class AgentLauncher(SrunLauncher):
    """Has the ranks started by agents, one on each node, which live as long as this launcher.

    Agents that are missing are started in a further step, beside those that are there. If some do
    not connect, srun starts all ranks of the attempt, as tasks of their own; if none does, or the
    same one a second time, those of all further attempts, too.
    """

    def __init__(
        self,
        allocation: Allocation,
        section: SuperviseSection,
        surroundings: Surroundings | None = None,
    ) -> None:
        super().__init__(allocation, section, surroundings)
        self._steps: list[AgentStep] = []
        self._ranks = RanksAway()
        self._slots = SlotsAway(self._ask_for_slots)
        self._program: Program | None = None
        self._fleet: Fleet | None = None
        self._attempt = 0
        self._given_up: set[tuple[str, int]] = set()
        self._by_srun = False
        self._missed: set[str] = set()

    def prepare(self, program: Program) -> None:
        """Start the agents, which start the imports."""
        self._program = program
        if self._by_srun:
            return
        if self._fleet is None:
            listeners = listen(self.addresses, self._section.ports)
            self._fleet = Fleet(listeners, len(self.nodes), self._hear, self._refusal)
        self._have_agents()

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Tell each agent to start its ranks; `post` hears how they end."""
        self.prepare(program)
        if not self._by_srun and not self._agents.wait_until(
            self._all_connected, self._time_to_come()
        ):
            self._do_without()
        if self._by_srun:
            self._start_by_srun(launch, program, post)
            return
        allocation, self._attempt, self._killed_at = self._allocation, launch.attempt.number, None
        job = allocation.job if allocation.batch else None
        variables = without_token(replace(launch, job=job).environment())
        buddies = self._slots.pair(allocation.nodes, launch.buddy)
        master = choose_master(os.environ, allocation.nodes, launch.attempt.nonce, self.bound)
        self._ranks.begin(allocation.places(), post)
        for node, ranks in allocation.places().items():
            sealed = seal(self._agents.secret, launch.control.secret.token)
            which = ranks.start, len(ranks), allocation.size
            told = variables | buddies.get(node, {})
            self._agents.order(node, StartRanks(self._attempt, told, sealed, *which, master))

    def _start_by_srun(
        self, launch: Launch, program: Program, post: Callable[[RankExit], None]
    ) -> None:
        super().start(launch, program, post)

    def ask_to_stop(self) -> None:
        """Have the agents signal each rank."""
        if self._by_srun:
            super().ask_to_stop()
            return
        for node in self._allocation.nodes:
            self._agents.order(node, StopRanks(self._attempt))

    def kill(self) -> None:
        """Have the agents end all that is left; called again later, end agents that do not."""
        if self._by_srun:
            super().kill()
        elif not self._attempt:
            pass
        elif self._killed_at is None:
            self._killed_at = self._clock.now()
            for node in self._allocation.nodes:
                self._agents.order(node, KillRanks(self._attempt))
        elif self._clock.now() - self._killed_at > DEAF_AFTER:
            for node in self._ranks.nodes():
                if not self._is_gone(node) and not self._is_well(node):
                    self._give_up(node)

    def alive(self) -> bool:
        """Whether any rank has not been seen to end, with its node's agent there to see it."""
        if self._by_srun:
            return super().alive()
        for node in self._ranks.nodes():
            if self._is_gone(node):
                self._ranks.lose(node, None, self._was_killed())
        return bool(self._ranks.nodes())

    def waits(self) -> bool:
        """Whether srun could not start the agents, and is to be started again."""
        if self._by_srun:
            return super().waits()
        return any(step.waits for step in self._steps)

    def prepare_again(
        self, lost: Sequence[str], stuck: Mapping[str, Sequence[int]]
    ) -> CannotRestart | None:
        """As `SrunLauncher`; agents that do not do what they are told are accused, too."""
        if self._by_srun:
            unable = super().prepare_again(lost, stuck)
            self._by_srun = self._fleet is None
            return unable
        used = self._allocation.nodes
        awaited = [node for node in used if self._is_well(node)]
        done = lambda node: self._has_cleared(node) or not self._is_well(node)  # noqa: E731
        self._agents.wait_until(lambda: all(map(done, awaited)), CLEARED_WITHIN)
        unresponsive = [
            node for node in used if not self._is_gone(node) and not self._has_cleared(node)
        ]
        if silent := set(unresponsive) & set(awaited):
            logger().warning("agents do not do what they are told", nodes=sorted(silent))
        unable = super().prepare_again([*lost, *unresponsive], stuck)
        for node in set(unresponsive) & set(self.nodes):
            if not self._has_cleared(node):
                self._remove_agent(node)
        self._agents.forget_orders()
        return unable

    def offers(self, nonce: str) -> Sequence[Offer]:
        """What the agents that answer hold, once each has ended what is left of its ranks."""
        if self._by_srun:
            return ()
        nodes = self._allocation.nodes
        settled = lambda node: self._has_cleared(node) or not self._is_well(node)  # noqa: E731
        if not self._agents.wait_until(lambda: all(map(settled, nodes)), CLEARED_WITHIN):
            logger().warning("a rank is still there, so its steps in memory are not salvaged")
            return ()
        return self._slots.offers(list(filter(self._has_cleared, nodes)), nonce)

    def pour(self, nonce: str, step: int, folder: Path) -> Sequence[Poured]:
        """Each agent writes what it holds."""
        return self._slots.pour(nonce, step, folder)

    def look(self, node: str, pids: Sequence[int]) -> Sequence[str]:
        """By the node's agent, if it answers."""
        if not self._by_srun and self._is_well(node):
            asked = {node: Question(look=tuple(pids))}
            if told := self._agents.ask(asked, ANSWER_WITHIN, self._is_gone):
                return told[node].seen
        return super().look(node, pids)

    def ask_idle(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """By the nodes' agents, which are there since the ranks were started."""
        if self._by_srun:
            return super().ask_idle(question)
        asked = dict.fromkeys(self.idle.nodes, Question(about=question_text(question)))
        within = srun_probe.survey_within(question)
        answers = self._agents.ask(asked, within, lambda node: not self._is_well(node))
        return [v for answer in answers.values() if (v := read_result(answer.vitals)) is not None]

    def close(self) -> None:
        """Send the agents away, and wait for srun."""
        if self._fleet is None:
            return
        self._fleet.close()
        for step in self._steps:
            left = all(map(self._has_left, step.nodes - step.gone))
            step.end(END_WITHIN if left else LOST_WITHIN)
        self._fleet, self._steps, self._attempt = None, [], 0

    def _all_connected(self) -> bool:
        """Whether each node that is used has an agent, or Slurm cannot start one just now."""
        return self.waits() or not self._unconnected()

    def _unconnected(self) -> set[str]:
        """Nodes of the job that are used, and have no agent yet."""
        used = set(self._allocation.nodes) & set(self._own_nodes)
        return {node for node in used if not self._is_connected(node)}

    def _is_connected(self, node: str) -> bool:
        seen = self._agents.seen(node)
        return seen is not None and any(
            step.covers(node) and step.number == seen.step for step in self._steps
        )

    def _do_without(self) -> None:
        """Have srun start the ranks: this once, if only some agents do not connect, for the first
        time."""
        missing = self._unconnected()
        logger().warning(
            "agents do not connect, so the ranks are not forked", nodes=sorted(missing)
        )
        self._by_srun = True
        if missing == set(self._allocation.nodes) or missing & self._missed:
            self.close()
        self._missed |= missing
        for node in missing:
            self._mark_gone(node, len(self._steps))

    def _time_to_come(self) -> float:
        """Seconds that agents still get to connect; those of a step that has ended get none."""
        began = max((step.began for step in self._steps if step.alive), default=-inf)
        return max(0.0, began + COME_WITHIN + self._around.delay - time.monotonic())

    @property
    def _agents(self) -> Fleet:
        assert self._fleet is not None, "prepare comes first"
        return self._fleet

    def _have_agents(self) -> None:
        """Start a step for nodes that have no agent, nor one that may come.

        Those that had one are not held up by those that may be gone.
        """
        missing = [node for node in self._own_nodes if self._is_gone(node)]
        known = [node for node in missing if self._agents.seen(node) is not None]
        for group in (known, [node for node in missing if node not in known]):
            for nodes in self._allocation.steps(group):
                self._start_agents(nodes)

    def _start_agents(self, nodes: Sequence[str]) -> None:
        assert self._program is not None
        step = AgentStep(len(self._steps), nodes, self._hear_task_end)
        where = self.addresses, self._agents.port, self._agents.secret.token
        environ = agent_environment(*where, step.number)
        agent = [*self._around.run(node_agent.__name__), node_agent.program_text(self._program)]
        command = [*self._step("kempner-agents", nodes, 1), "--no-kill", *DEAF, *agent]
        self._steps.append(step)
        self._starts += 1
        try:
            step.start(command, environ)
        except SlurmError as error:
            raise UsageError(f"{error}; use --launcher local") from error

    def _survey(self, question: ProbeQuestion, nodes: Sequence[str]) -> list[ProbeResult]:
        if self._by_srun:
            return super()._survey(question, nodes)
        about, answers = question_text(question), dict[str, Answer]()
        left = list(nodes)
        for _ in range(SURVEYS):
            self._have_agents()
            asked = dict.fromkeys(left, Question(about=about))
            within = srun_probe.survey_within(question) + self._around.delay
            answers |= self._agents.ask(asked, within, self._is_gone)
            left = [node for node in nodes if node not in answers]
            for node in left:
                if not self._is_gone(node) and not self._is_well(node):
                    self._remove_agent(node)
            if not any(map(self._is_gone, left)):
                break
        return [v for answer in answers.values() if (v := read_result(answer.vitals)) is not None]

    def _present(
        self, accused: Collection[str], stuck: Mapping[str, Sequence[int]]
    ) -> dict[str, tuple[int, ...]]:
        """By the agents; Slurm is asked where accused ones do not answer."""
        if self._by_srun:
            return super()._present(accused, stuck)
        asked = {node: Question(pids=tuple(stuck.get(node, ()))) for node in self.nodes}
        expected = {node for node in accused if self._is_well(node)}
        told = self._agents.ask(asked, ANSWER_WITHIN, lambda node: node not in expected)
        answers = {node: answer.left for node, answer in told.items()}
        if set(accused) <= set(answers):
            return answers
        return super()._present(accused, stuck)

    def _ask_for_slots(self, texts: Mapping[str, str], patient: bool) -> dict[str, str]:
        asked = {node: Question(slots=text) for node, text in texts.items()}
        answers = self._agents.ask(asked, inf if patient else ANSWER_WITHIN, self._is_gone)
        return {node: answer.slots for node, answer in answers.items()}

    def _wait_for_end(self, patience: float) -> None:
        """Agents that have cleared up stay."""
        if self._by_srun:
            super()._wait_for_end(patience)

    def _is_well(self, node: str) -> bool:
        """Whether a node's agent has sent a message recently."""
        seen = self._agents.seen(node)
        return seen is not None and seen.well

    def _has_cleared(self, node: str) -> bool:
        seen = self._agents.seen(node)
        return seen is not None and seen.cleared >= self._attempt

    def _has_left(self, node: str) -> bool:
        seen = self._agents.seen(node)
        return seen is not None and not seen.linked and seen.hung_up

    def _is_gone(self, node: str) -> bool:
        """Whether the agent of a node has ended, as srun reports or its link shows."""
        covering = [step.number for step in self._steps if step.covers(node)]
        if not covering:
            return True
        seen = self._agents.seen(node)
        if seen is None or seen.linked or seen.step < max(covering):
            return False
        if time.monotonic() - seen.went_at < (HUNG_UP if seen.hung_up else AWAY):
            return False
        self._mark_gone(node, seen.step)
        return True

    def _mark_gone(self, node: str, step: int) -> None:
        for one in self._steps:
            if one.number <= step:
                one.gone.add(node)

    def _remove_agent(self, node: str) -> None:
        """End an agent that does nothing, and expect it no more."""
        if (seen := self._agents.seen(node)) is not None:
            self._give_up(node)
            self._agents.wait_until(partial(self._is_gone, node), GIVEN_UP_WITHIN)
            self._mark_gone(node, seen.step)

    def _give_up(self, node: str) -> None:
        """End an agent that does nothing; with it goes what is left of its ranks."""
        seen = self._agents.seen(node)
        if seen is None or (node, seen.pid) in self._given_up:
            return
        self._given_up.add((node, seen.pid))
        logger().warning("an agent does nothing, and is ended", node=node, pid=seen.pid)
        if node == node_name(os.environ):
            with suppress(ProcessLookupError):
                os.kill(seen.pid, signal.SIGKILL)
        else:
            end = partial(srun_probe.kill, node, seen.pid, self._outside)
            start_thread("end agent", end)

    def _hear(self, node: str, news: FleetNews) -> None:
        """Take in that a rank has ended, as its agent reports."""
        if isinstance(news, Ended) and news.attempt == self._attempt:
            how = (news.sent == "kill", news.sentence, news.oom_kills, news.sent == "stop")
            self._ranks.end(RankExit(news.rank, news.status, *how))

    def _refusal(self, hello: AgentHello) -> str:
        """Why an agent of another job cannot join."""
        return NO_OTHERS

    def _hear_task_end(self, step: AgentStep, task: int, status: int) -> None:
        """Take in that an agent has ended, as srun reports; what it has started dies with it."""
        for node in step.nodes:
            seen = None if self._fleet is None else self._fleet.seen(node)
            if seen is not None and (seen.step, seen.task) == (step.number, task):
                self._mark_gone(node, step.number)
                self._ranks.lose(node, status if status < 0 else None, self._was_killed())
