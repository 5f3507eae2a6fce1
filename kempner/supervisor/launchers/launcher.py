"""The launcher starts, signals and kills ranks, and examines nodes, through the agents of the
nodes.

Every node has an agent: in a Slurm job a task of its own (`agents/step.py`), on a laptop a thread
of this process (`local.py`)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from kempner.checkpoint.slots.pour import Offer, Poured
from kempner.cluster.slurm.hostlist import node_name, node_of
from kempner.probe.activity import Stillness
from kempner.probe.node import (
    SITE_CHECK,
    ProbeQuestion,
    ProbeResult,
    question_text,
    read_result,
)
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import RankNews, SummedReports, TellRanks
from kempner.run.output.logs import logger
from kempner.run.process.threads import AwakeClock
from kempner.run.process.whereabouts import CodePlace
from kempner.supervisor.control.rank_connections import RankChannel
from kempner.supervisor.launchers.agents import node_agent
from kempner.supervisor.launchers.agents.fleet import (
    SILENT,
    AgentConnected,
    AgentDisconnected,
    AgentSlots,
    Fleet,
    FleetNews,
)
from kempner.supervisor.launchers.agents.invitation import Invitation
from kempner.supervisor.launchers.agents.messages import (
    ActivityReport,
    DepartureRequest,
    Ended,
    GpuReport,
    KillRanks,
    Question,
    RankActivity,
    SealedLaunch,
    StartRanks,
)
from kempner.supervisor.launchers.base import CannotRestart, Program
from kempner.supervisor.launchers.run_nodes import RunningRanks, RunNodes, TorchrunEnds
from kempner.supervisor.nodes import srun_probe
from kempner.supervisor.nodes.exclusion import lost_nodes, still_boots
from kempner.supervisor.policy.outcome import RankExit

if TYPE_CHECKING:
    from kempner.supervisor.launchers.agents.step import SlurmAgents
    from kempner.supervisor.launchers.local import LocalAgent

ANSWER_WITHIN = 3.0
"""Seconds for agents to answer before Slurm is asked about their nodes."""

SURVEYS = 2
"""Times that nodes are asked: an agent may have died unnoticed, or with a step that Slurm
aborted."""

KILL_AGENT_AFTER = 4.0
"""Seconds after which an agent that has not killed its ranks is killed itself."""

BOOT_WITHIN, BOOT_LOOK = 600.0, 10.0
"""Seconds to wait for nodes that still boot when the job begins, and between two looks at them."""

RECONNECT_WITHIN, HUNG_UP = 15.0, 1.0
"""Seconds to wait for an agent of another job whose link is broken, and if its process has probably
ended. A living agent reconnects at once, and can also join again later."""

FRESH = 90.0
"""Seconds for which a report that a rank works is valid; agents report at least every 30 s."""

LEFT = "it has left the run"
CUT_OFF = "it is cut off from the network, its agent does not connect any more"


class Launcher:
    """Starts the ranks of one attempt after the other.

    The agents live as long as the launcher. With `torchrun` each of them starts one torchrun, which
    starts the node's ranks. `contained`: the ranks run in a container, so agents cannot run the
    site's own check."""

    def __init__(
        self,
        nodes: RunNodes,
        agents: SlurmAgents | LocalAgent,
        *,
        torchrun: bool = False,
        contained: bool = False,
    ) -> None:
        self.nodes, self.agents = nodes, agents
        self._torchrun, self._contained = torchrun, contained
        nodes.is_well = self._is_well
        self._ranks, self._slots = RunningRanks(), AgentSlots(self._ask_for_slots)
        self._program: Program | None = None
        self._channel: RankChannel | None = None
        self._fleet: Fleet
        self._opened = False
        self._attempt = 0
        self._killed_at: float | None = None
        self._clock = AwakeClock()
        self._activity: dict[str, tuple[float, tuple[RankActivity, ...]]] = {}
        self._gpus: deque[tuple[str, GpuReport]] = deque()
        self._silent: tuple[str, ...] = ()
        self._off_network = frozenset[str]()
        self._invited: tuple[Path, Invitation] | None = None

    def node_of(self, rank: int | None) -> str:
        """The node of a rank; empty if not known."""
        places = self.nodes.allocation.places()
        return next((node for node, ranks in places.items() if rank in ranks), "")

    def prepare(self, program: Program) -> None:
        """Start the agents, which start the imports."""
        if not self._opened:
            tasks = self.nodes.allocation.tasks_per_node
            self._program = program.in_torchrun(tasks) if self._torchrun else program
            self._fleet = self.agents.open(
                self._program, self._hear, self.nodes.refusal, self._lose
            )
            self._opened = True
        self.agents.start_missing()

    def invite(self, invitation: Path) -> None:
        """Write the file `invitation`, with which nodes of other jobs can join until `close`, if
        this run takes any. If it cannot be written, none can join, and the run goes on."""
        if self._program is None or not (self.nodes.takes_others and self.agents.takes_others):
            return
        program, token = node_agent.program_text(self._program), self._fleet.secret.token
        folder = str(Path.cwd())
        content = Invitation(self.agents.addresses, self._fleet.port, token, program, folder)
        try:
            content.write(invitation)
            self._invited = invitation, content
        except OSError as error:
            logger().warning("no other job can join this run", reason=error.strerror)

    def start(
        self,
        launch: Launch,
        program: Program,
        post: Callable[[RankExit], None],
        channel: RankChannel | None = None,
    ) -> None:
        """Start every rank as `program`, with `launch` in its environment.

        `post` is called, from any thread, with the end of each rank; `channel` gets the ranks'
        messages."""
        self._channel = channel
        self.prepare(program)
        self._activity.clear()
        self._await_agents()
        allocation, self._attempt, self._killed_at = (
            self.nodes.allocation,
            launch.attempt.number,
            None,
        )
        nodes, places, size = allocation.nodes, allocation.places(), allocation.size
        ranks_in_all = size if self._torchrun else None
        if self._torchrun:
            launch = replace(launch, in_memory=False, buddy=None)
            post = TorchrunEnds(len(nodes), size, post).post
            places, size = {node: range(n, n + 1) for n, node in enumerate(nodes)}, len(nodes)
        launch = self.agents.launch(launch)
        buddies, master = self._slots.pair(nodes, launch.buddy), self.agents.master(launch)
        bindings = {} if self._torchrun else self.agents.bindings()
        self._ranks.begin(places, post)
        for node, ranks in places.items():
            sealed, which = SealedLaunch.of(launch, self._fleet.secret), (ranks.start, len(ranks))
            buddy, bound = buddies.get(node), tuple(bindings.get(node, ()))
            order = StartRanks(
                self._attempt, sealed, *which, size, master, buddy, bound, ranks_in_all
            )
            self._fleet.order(node, order)

    def tell_ranks(self, message: TellRanks, node: str | None) -> None:
        """Have the agent of a node, or all (None), pass a message on to their ranks; from any
        thread."""
        if self._opened:
            self._fleet.tell_ranks(message, node)

    def kill(self) -> None:
        """Have the agents kill all ranks. If called again later, kill agents that have not done
        so."""
        if not self._attempt:
            return
        if self._killed_at is None:
            self._killed_at = self._clock.now()
            for node in self.nodes.allocation.nodes:
                self._fleet.order(node, KillRanks(self._attempt))
            self._wait_settled(self.nodes.allocation.nodes, self.agents.killed_within)
        elif self._clock.now() - self._killed_at > KILL_AGENT_AFTER:
            for node in self._ranks.nodes():
                if not self._is_gone(node) and not self._is_well(node):
                    self._give_up(node)

    def alive(self) -> bool:
        """Whether any rank has not ended. Ranks whose agent is gone are taken for lost, and their
        ends posted."""
        for node in self._ranks.nodes():
            if self._is_gone(node):
                self._lose(node, None, self.agents.refusal_of(node))
        return bool(self._ranks.nodes())

    def activity(self) -> dict[int, Stillness]:
        """What the ranks of a user's program are doing, as their agents observe from outside."""
        found = {}
        for seen_at, ranks in list(self._activity.values()):
            fresh = time.monotonic() - seen_at < FRESH
            for rank in ranks:
                place = rank.place and CodePlace(*rank.place)
                works = rank.works and fresh
                found[rank.rank] = Stillness(rank.idle, rank.still, place, works)
        return found

    def gpu_news(self) -> list[tuple[str, GpuReport]]:
        """The reports of GPU errors, with their nodes, since the last call."""
        return [self._gpus.popleft() for _ in range(len(self._gpus))]

    def prepare_again(
        self, lost: Sequence[str], stuck: Mapping[str, Sequence[int]]
    ) -> CannotRestart | None:
        """Get ready for another start. Spare nodes replace those of the `lost` hosts that do not
        answer, nodes whose agents do not carry out orders, and hosts on which one of the `stuck`
        processes, which were killed, still runs.

        May take a minute. Returns why the ranks cannot be started again here, or None if they can.
        """
        least, unresponsive = self.nodes.least, list[str]()
        if self._opened:
            unresponsive = self._clear()
        if unresponsive and self.agents.here:
            reason = "a rank of the attempt before cannot be killed, and nothing can replace it"
            return CannotRestart(f"{reason} on this machine", ())
        bad = self._leave_out([*lost, *unresponsive], stuck)
        for node in set(unresponsive) & set(self.nodes.all) - set(self.nodes.joined):
            if not self._has_cleared(node):
                self.agents.remove(node)
        if self._opened:
            self._fleet.forget_orders()
            for node, joined in self.nodes.joined.items():
                if joined.leaves_by is not None:
                    self._fleet.dismiss(node)
        self._killed_at = None
        if len(self.nodes.allocation.nodes) < least:
            why = "; ".join(f"{node}: {reason}" for node, reason in bad.items())
            return CannotRestart(f"too few nodes: {why}", tuple(bad))
        return None

    def survey(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """Probe all nodes; the answers that came in time. Nodes that give none are examined before
        the next start. Waits for nodes that still boot, as in a cloud."""
        found: dict[str, str] = {}
        if question.site_check is not None and self._contained:
            found = self._check_site(question)
            question = replace(question, site_check=None)
        results, began = self._survey(question, self.nodes.all), self._clock.now()
        while booting := [
            n
            for n, flags in srun_probe.states(_silent(self._of_slurm, results)).items()
            if still_boots(flags)
        ]:
            if self._clock.now() - began > BOOT_WITHIN:
                break
            logger().info("waiting for nodes that boot", nodes=booting)
            time.sleep(BOOT_LOOK)
            results += self._survey(question, booting)
        self._silent = _silent(self.nodes.all, results)
        self.agents.bound |= {result.node: result.interface for result in results}
        return [
            replace(result, troubles={**result.troubles, SITE_CHECK: found[result.node]})
            if result.node in found
            else result
            for result in results
        ]

    def ask_idle(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """Probe the nodes without ranks while the ranks run; the answers that came in time. From
        any thread."""
        asked = dict.fromkeys(self.nodes.idle.nodes, Question(about=question_text(question)))
        within = srun_probe.survey_within(question)
        answers = self._fleet.ask(asked, within, lambda node: not self._is_well(node))
        return [v for answer in answers.values() if (v := read_result(answer.vitals)) is not None]

    def offers(self, nonce: str) -> Sequence[Offer]:
        """The steps in memory of the attempt with this nonce, once its ranks are gone; for nodes
        that cannot be reached, the copies of their buddies. Raises `OSError`."""
        used = self.nodes.allocation.nodes
        if self._torchrun or not self._wait_settled(used, self.agents.cleared_within):
            logger().warning("a rank is still there, so its steps in memory are not salvaged")
            return ()
        return self._slots.offers(list(filter(self._has_cleared, used)), nonce)

    def pour(self, nonce: str, step: int, folder: Path) -> Sequence[Poured]:
        """Have the nodes write their parts of a step into `folder`. Raises `OSError`."""
        return self._slots.pour(nonce, step, folder)

    def leave_out(self, nodes: Collection[str]) -> None:
        """Start no more ranks on these nodes, and order their agents to leave; spare nodes replace
        them."""
        self.nodes.lose(nodes)
        for node in nodes:
            self._fleet.dismiss(node)

    def look(self, node: str, pids: Sequence[int]) -> Sequence[str]:
        """Describe processes on another node: a line each, or nothing without an answer. From any
        thread."""
        if self.agents.here:
            return ()
        if self._opened and self._is_well(node):
            asked = {node: Question(look=tuple(pids))}
            if answers := self._fleet.ask(asked, ANSWER_WITHIN, self._is_gone):
                return answers[node].seen
        return () if node in self.nodes.joined else srun_probe.look(node, pids, self.nodes.outside)

    def close(self) -> None:
        """Order the agents to leave, and wait until they are gone."""
        if not self._opened:
            return
        if self._invited is not None:
            path, content = self._invited
            try:
                content.withdraw(path)
            except OSError as error:
                logger().warning("the invitation is still there", reason=error.strerror)
        self._fleet.close()
        self.agents.close(self._has_left)
        self._opened, self._attempt, self._invited = False, 0, None

    @property
    def _of_slurm(self) -> Sequence[str]:
        """The nodes about which Slurm can be asked."""
        return () if self.agents.here else self.nodes.own

    def _await_agents(self) -> None:
        """Wait until each node with ranks has an agent. Agents that do not connect are started
        again, linked through srun. If that fails, the node's ranks are lost; also at once if the
        node is cut off: its agent was connected before, and those of other nodes are now."""
        used = self.nodes.allocation.nodes
        connected = lambda: self.agents.waits or not self._unconnected(used)  # noqa: E731
        if self._fleet.wait_until(connected, self.agents.connect_timeout()):
            return
        missing = self._unconnected(used)
        if len(missing) < len(used):
            self._off_network = frozenset(n for n in missing if self._fleet.seen.get(n) is not None)
            self._lose_agents(self._off_network, "a node is cut off from the network")
            missing -= self._off_network
            if not missing:
                return
        what = "agents do not connect: linking them through srun"
        logger().warning(what, nodes=sorted(missing))
        self.agents.reach_by_srun(missing)
        if not self._fleet.wait_until(connected, self.agents.connect_timeout()):
            self._lose_agents(self._unconnected(used), "a node has no agent")

    def _lose_agents(self, nodes: Collection[str], why: str) -> None:
        for node in nodes:
            logger().warning(why, node=node)
            self.agents.forget(node)

    def _unconnected(self, nodes: Collection[str]) -> set[str]:
        """Those of `nodes` that belong to the job and have no agent yet."""
        own = set(nodes) & set(self.nodes.own)
        return {node for node in own if not self.agents.is_connected(node)}

    def _clear(self) -> list[str]:
        """Wait until nothing is left of the attempt; the nodes where that could not be
        confirmed."""
        used = self.nodes.allocation.nodes
        awaited = [node for node in used if self._is_well(node)]
        self._wait_settled(awaited, self.agents.cleared_within)
        unresponsive = [
            node for node in used if not self._is_gone(node) and not self._has_cleared(node)
        ]
        if silent := set(unresponsive) & set(awaited):
            logger().warning("agents do not carry out orders", nodes=sorted(silent))
        return unresponsive

    def _leave_out(self, lost: Sequence[str], stuck: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Remove unusable nodes from the allocation; each with the reason."""
        names = self.nodes.all
        known = {node_of(host, names) for host in (*lost, *stuck, *self._silent)}
        bad = self._lost_nodes(known, {node_of(host, names): pids for host, pids in stuck.items()})
        bad = dict.fromkeys(self._off_network.intersection(names), CUT_OFF) | bad
        self._off_network = frozenset()
        self.nodes.lose(bad)
        if bad:
            why = "; ".join(f"{node}: {reason}" for node, reason in bad.items())
            left = len(self.nodes.allocation.nodes)
            logger().warning(
                f"{why}; {left} node{'' if left == 1 else 's'} remain{'s' * (left == 1)}"
            )
        return bad

    def _lost_nodes(
        self, accused: Collection[str], stuck: Mapping[str, Sequence[int]]
    ) -> dict[str, str]:
        """The unusable nodes: those of the `accused` that do not answer or have `stuck` processes,
        unless all nodes are silent, and nodes of other jobs that are gone for any reason."""
        own, here = set(self._of_slurm), node_name(os.environ)
        held = (*self.nodes.allocation.nodes, *self.nodes.allocation.spare)
        there = set(self.nodes.there()) - stuck.keys()
        gone = {node: LEFT for node in held if node in self.nodes.joined and node not in there}
        accused = own & set(accused)
        stuck = {node: pids for node, pids in stuck.items() if node in own}
        if not stuck and not accused - {here}:
            return gone
        answers = self._present(accused, stuck)
        silent = sorted(accused - set(answers))
        found = lost_nodes(accused, answers, srun_probe.states(silent), here)
        for node in sorted(set(silent) - set(found)):
            logger().info("no answer, and no sign against it", node=node)
        return found | gone

    def _present(
        self, accused: Collection[str], stuck: Mapping[str, Sequence[int]]
    ) -> dict[str, tuple[int, ...]]:
        """The nodes that answer, each with those of its `stuck` processes that still run. Asks the
        agents, then Slurm if an accused node does not answer."""
        if self._opened:
            asked = {node: Question(pids=tuple(stuck.get(node, ()))) for node in self.nodes.all}
            expected = {node for node in accused if self._is_well(node)}
            answers = self._fleet.ask(asked, ANSWER_WITHIN, lambda node: node not in expected)
            if set(accused) <= set(answers):
                return {node: answer.left for node, answer in answers.items()}
        return srun_probe.present(self.nodes.own, stuck, self.nodes.outside)

    def _check_site(self, question: ProbeQuestion) -> dict[str, str]:
        """Run the site's check on the nodes, outside of the ranks' container; the troubles, by
        node."""
        asked = replace(question, folders=(), on_one_node=True)
        results = srun_probe.survey(asked, self.nodes.own, self.nodes.outside)
        return {r.node: r.troubles[SITE_CHECK] for r in results if SITE_CHECK in r.troubles}

    def _survey(self, question: ProbeQuestion, nodes: Sequence[str]) -> list[ProbeResult]:
        asked, answers = Question(about=question_text(question)), dict[str, ProbeResult]()
        left = list(nodes)
        for _ in range(SURVEYS):
            self.agents.start_missing()
            within = srun_probe.survey_within(question)
            if self._unconnected(left):
                within += self.agents.connect_timeout()
            replies = self._fleet.ask(dict.fromkeys(left, asked), within, self._is_gone)
            answers |= {
                n: v for n, a in replies.items() if (v := read_result(a.vitals)) is not None
            }
            left = [node for node in nodes if node not in replies]
            for node in set(left) - set(self.nodes.joined):
                if not self._is_gone(node) and not self._is_well(node):
                    self.agents.remove(node)
            if not any(map(self._is_gone, left)):
                break
        return list(answers.values())

    def _ask_for_slots(self, texts: Mapping[str, str], patient: bool) -> dict[str, str]:
        asked = {node: Question(slots=text) for node, text in texts.items()}
        answers = self._fleet.ask(asked, inf if patient else ANSWER_WITHIN, self._is_gone)
        return {node: answer.slots for node, answer in answers.items()}

    def _is_well(self, node: str) -> bool:
        """Whether a node's agent has sent a message recently."""
        seen = self._fleet.seen.get(node) if self._opened else None
        if seen is None or self.agents.here:
            return seen is not None
        return seen.linked and time.monotonic() - seen.heard_at < SILENT

    def _has_cleared(self, node: str) -> bool:
        seen = self._fleet.seen.get(node)
        return seen is not None and seen.cleared >= self._attempt

    def _wait_settled(self, nodes: Sequence[str], within: float) -> bool:
        """Wait until nothing is left of the attempt on any of `nodes` whose agent responds."""
        return self._fleet.wait_until(
            lambda: all(self._has_cleared(node) or not self._is_well(node) for node in nodes),
            within,
        )

    def _has_left(self, node: str) -> bool:
        seen = self._fleet.seen.get(node)
        return seen is not None and not seen.linked and seen.hung_up

    def _is_gone(self, node: str) -> bool:
        """Whether the agent of a node has ended."""
        if node not in self.nodes.joined:
            return self.agents.is_gone(node)
        seen = self._fleet.seen.get(node)
        if seen is None or seen.linked:
            return seen is None
        return time.monotonic() - seen.went_at > (HUNG_UP if seen.hung_up else RECONNECT_WITHIN)

    def _give_up(self, node: str) -> None:
        """Kill an agent of this job. An agent of another job is only ordered to leave: ranks that
        it still runs have no more part in the run."""
        if node in self.nodes.joined:
            self._fleet.dismiss(node)
            self._lose(node, None)
        else:
            self.agents.end(node)

    def _lose(self, node: str, status: int | None, refusal: str = "") -> None:
        """The ranks that are left on a node are gone, or were never started because of a
        `refusal`."""
        self._ranks.lose(node, status, self._killed_at is not None, refusal)

    def _hear(self, node: str, news: FleetNews) -> None:
        """Handle a message of an agent, or its connection or disconnection."""
        match news:
            case Ended() if news.attempt == self._attempt:
                how = (news.sent == "kill", news.sentence, news.oom_kills, news.sent == "stop")
                unstarted = news.sent == "nothing"
                self._ranks.end(RankExit(news.rank, news.status, *how, unstarted=unstarted))
            case RankNews() | SummedReports():
                if self._channel is not None:
                    self._channel.hear(node, news)
            case GpuReport():
                self._gpus.append((node, news))
            case ActivityReport(attempt) if attempt == self._attempt:
                self._note_activity(node, news)
            case AgentDisconnected(reason, hung_up):
                self._cut_off(node, reason, hung_up)
            case AgentConnected():
                self._welcome(node, news)
            case DepartureRequest():
                self.nodes.depart(node, news)
                if node not in self.nodes.allocation.nodes:
                    self._fleet.dismiss(node)

    def _welcome(self, node: str, agent: AgentConnected) -> None:
        self._cut_off(node, "its agent has connected again", False)
        if agent.joins is not None and self.nodes.join(node, agent.pid, agent.joins):
            self._lose(node, None)  # its ranks ended with the agent before

    def _note_activity(self, node: str, report: ActivityReport) -> None:
        """Store a report; places, which are reported only once in a hang, are kept from earlier
        ones."""
        _, before = self._activity.get(node, (0.0, ()))
        places = {r.rank: r.place for r in before if r.place is not None}
        ranks = (replace(r, place=r.place or places.get(r.rank)) for r in report.ranks)
        self._activity[node] = time.monotonic(), tuple(ranks)

    def _cut_off(self, node: str, reason: str, hung_up: bool) -> None:
        if self._channel is not None:
            self._channel.cut_off(node, reason, hung_up)


def _silent(nodes: Sequence[str], results: Sequence[ProbeResult]) -> tuple[str, ...]:
    answered = {result.node for result in results}
    return tuple(node for node in nodes if node not in answered)
