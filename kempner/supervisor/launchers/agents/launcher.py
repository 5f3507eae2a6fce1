"""Agent launcher: ranks are forked by an agent on each node of a Slurm job."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf

from kempner.cluster.network.ports import free_port
from kempner.cluster.slurm.allocation import Allocation
from kempner.cluster.slurm.command import SlurmError, step_environment
from kempner.cluster.slurm.hostlist import node_name
from kempner.config.sections import SuperviseSection
from kempner.run.control.launch_env import Launch, without_token
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.helper_thread import start_thread
from kempner.supervisor.control.auth import listen
from kempner.supervisor.launchers.agents import node_agent
from kempner.supervisor.launchers.agents.affinity import binding_asked_for
from kempner.supervisor.launchers.agents.fleet import Fleet
from kempner.supervisor.launchers.agents.messages import (
    ADDRESS,
    PORT,
    STEP,
    TOKEN,
    Answer,
    Ended,
    KillRanks,
    Question,
    StartRanks,
    StopRanks,
    seal,
)
from kempner.supervisor.launchers.agents.ranks_away import RanksAway
from kempner.supervisor.launchers.agents.step import AgentStep
from kempner.supervisor.launchers.base import CannotRestart, Program
from kempner.supervisor.launchers.srun import DEAF, SrunLauncher
from kempner.supervisor.nodes import srun_probe
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult, question_text, read_result
from kempner.supervisor.policy.outcome import RankExit

COME_WITHIN = 30.0
"""Seconds within which an agent connects: it starts in one."""

ANSWER_WITHIN = 3.0
"""Seconds that agents get to say that they are there, before Slurm is asked about their nodes."""

CLEARED_WITHIN = 15.0
"""Seconds within which an agent has ended what is left of an attempt."""

SURVEYS = 2
"""Times that nodes are asked how they are: agents may have died unnoticed, or with a step that
Slurm aborted because one node of it is gone."""

DEAF_AFTER = 4.0
"""Seconds without the end of ranks that were to be killed after which their agent is killed."""

GIVEN_UP_WITHIN = 10.0
"""Seconds for an agent that was killed, and for all that Slurm kills with it, to be gone."""

HUNG_UP = 3.0
"""Seconds after the end of an agent's process, seen by its link, in which srun may say how."""

AWAY = 45.0
"""Seconds after which an agent is not expected back whose link broke off in any other way: one that
has no ranks has left by then."""

SILENT = 6.0
"""Seconds without a sign of life after which an agent is not waited for."""

END_WITHIN, LOST_WITHIN = 10.0, 1.0
"""Seconds for srun to end when all agents have been sent away; one that waits for a node that is
gone is left behind."""


def why_no_agents(section: SuperviseSection, environ: Mapping[str, str]) -> str:
    """Why the ranks of a job must be tasks of srun; empty if agents can fork them."""
    if section.ports is not None and len(section.ports) < 2:
        return "supervise.control_ports has only one port"
    bound = binding_asked_for(step_environment(environ))
    return f"{bound} binds them, which only srun can do" if bound else ""


class AgentLauncher(SrunLauncher):
    """Has the ranks started by agents, one on each node, which live as long as this launcher.

    Agents that are missing are started in a further step, beside those that are there. If some do
    not connect, srun starts all ranks of the attempt, as tasks of their own; if none does, or the
    same one a second time, those of all further attempts, too.
    """

    def __init__(self, allocation: Allocation, section: SuperviseSection) -> None:
        super().__init__(allocation, section)
        self._steps: list[AgentStep] = []
        self._ranks = RanksAway()
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
            listener = listen(self.address, self._section.ports)
            self._fleet = Fleet(listener, len(self.nodes), self._hear_end)
        self._have_agents()

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Tell each agent to start its ranks; `post` hears how they end."""
        self.prepare(program)
        if not self._by_srun and not self._agents.wait_until(self._all_came, self._time_to_come()):
            self._do_without()
        if self._by_srun:
            super().start(launch, program, post)
            return
        allocation, self._attempt, self._killed_at = self._allocation, launch.attempt.number, None
        tasks, job = allocation.tasks_per_node, allocation.job if allocation.batch else None
        variables = without_token(replace(launch, job=job).environment())
        master = (allocation.nodes[0], free_port("", salt=launch.attempt.nonce))
        places = {
            node: range(i * tasks, (i + 1) * tasks) for i, node in enumerate(allocation.nodes)
        }
        self._ranks.begin(places, post)
        for node, ranks in places.items():
            sealed = seal(self._agents.secret, launch.control.secret.token)
            self._agents.order(
                node,
                StartRanks(
                    self._attempt,
                    variables,
                    sealed,
                    ranks.start,
                    tasks,
                    allocation.size,
                    master,
                ),
            )

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
        deaf = [node for node in used if not self._is_gone(node) and not self._has_cleared(node)]
        if silent := set(deaf) & set(awaited):
            logger().warning("agents do not do what they are told", nodes=sorted(silent))
        unable = super().prepare_again([*lost, *deaf], stuck)
        for node in set(deaf) & set(self.nodes):
            if not self._has_cleared(node):
                self._be_rid_of(node)
        self._agents.forget_orders()
        return unable

    def look(self, node: str, pids: Sequence[int]) -> Sequence[str]:
        """By the node's agent, if it answers."""
        if not self._by_srun and self._is_well(node):
            asked = {node: Question(look=tuple(pids))}
            if told := self._agents.ask(asked, ANSWER_WITHIN, self._is_gone):
                return told[node].seen
        return super().look(node, pids)

    def close(self) -> None:
        """Send the agents away, and wait for srun."""
        if self._fleet is None:
            return
        self._fleet.close()
        for step in self._steps:
            left = all(map(self._has_left, step.nodes - step.gone))
            step.end(END_WITHIN if left else LOST_WITHIN)
        self._fleet, self._steps, self._attempt = None, [], 0

    def _all_came(self) -> bool:
        """Whether each node that is used has an agent, or Slurm cannot start one just now."""
        return self.waits() or all(map(self._has_come, self._allocation.nodes))

    def _has_come(self, node: str) -> bool:
        seen = self._agents.seen(node)
        return seen is not None and any(
            step.covers(node) and step.number == seen.step for step in self._steps
        )

    def _do_without(self) -> None:
        """Have srun start the ranks: this once, if only some agents do not connect, for the first
        time."""
        missing = {node for node in self._allocation.nodes if not self._has_come(node)}
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
        return max(0.0, began + COME_WITHIN - time.monotonic())

    @property
    def _agents(self) -> Fleet:
        assert self._fleet is not None, "prepare comes first"
        return self._fleet

    def _have_agents(self) -> None:
        """Start a step for nodes that have no agent, nor one that may come.

        Those that had one are not held up by those that may be gone.
        """
        missing = [node for node in self.nodes if self._is_gone(node)]
        known = [node for node in missing if self._agents.seen(node) is not None]
        for group in (known, [node for node in missing if node not in known]):
            if group:
                self._start_agents(group)

    def _start_agents(self, nodes: Sequence[str]) -> None:
        assert self._program is not None
        step = AgentStep(len(self._steps), nodes, self._hear_task_end)
        environ = step_environment(os.environ) | {
            ADDRESS: self.address,
            PORT: str(self._agents.port),
            TOKEN: self._agents.secret.token,
            STEP: str(step.number),
        }
        environ.pop("TORCHELASTIC_RUN_ID", None)
        agent = [sys.executable, "-m", node_agent.__name__, node_agent.program_text(self._program)]
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
            answers |= self._agents.ask(asked, srun_probe.SURVEY_WITHIN, self._is_gone)
            left = [node for node in nodes if node not in answers]
            for node in left:
                if not self._is_gone(node) and not self._is_well(node):
                    self._be_rid_of(node)
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

    def _see_it_end(self, patience: float) -> None:
        """Agents that have cleared up stay."""
        if self._by_srun:
            super()._see_it_end(patience)

    def _is_well(self, node: str) -> bool:
        """Whether a node's agent has been heard of just now."""
        seen = self._agents.seen(node)
        return seen is not None and seen.linked and time.monotonic() - seen.heard_at < SILENT

    def _has_cleared(self, node: str) -> bool:
        seen = self._agents.seen(node)
        return seen is not None and seen.cleared >= self._attempt

    def _has_left(self, node: str) -> bool:
        seen = self._agents.seen(node)
        return seen is not None and not seen.linked and seen.hung_up

    def _is_gone(self, node: str) -> bool:
        """Whether the agent of a node has ended, by srun's word or its link."""
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

    def _be_rid_of(self, node: str) -> None:
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

    def _hear_end(self, node: str, end: Ended) -> None:
        """A rank has ended, by its agent's word."""
        if end.attempt == self._attempt:
            told = RankExit(end.rank, end.status, end.killed, end.sentence, end.oom_kills)
            self._ranks.end(told)

    def _hear_task_end(self, step: AgentStep, task: int, status: int) -> None:
        """An agent has ended, by srun's word; what it has started dies with it."""
        for node in step.nodes:
            seen = None if self._fleet is None else self._fleet.seen(node)
            if seen is not None and (seen.step, seen.task) == (step.number, task):
                self._mark_gone(node, step.number)
                self._ranks.lose(node, status if status < 0 else None, self._was_killed())
