"""Pool launcher: ranks on the nodes of a Slurm job, and on those of others that have joined.

The nodes of other jobs that have joined, and what is known of each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kempner.cluster.slurm.allocation import Allocation, avoid
from kempner.config.sections import SuperviseSection
from kempner.run.control.launch_env import Launch
from kempner.run.output.logs import logger
from kempner.supervisor.launchers.agents import node_agent
from kempner.supervisor.launchers.agents.fleet import FleetNews
from kempner.supervisor.launchers.agents.joined.invitation import Invitation
from kempner.supervisor.launchers.agents.launcher import AgentLauncher
from kempner.supervisor.launchers.agents.messages import AgentHello, DepartureRequest, Joins
from kempner.supervisor.launchers.agents.server import AgentConnected
from kempner.supervisor.launchers.base import CannotRestart, Idle, JoinedNode, Program
from kempner.supervisor.launchers.surroundings import Surroundings
from kempner.supervisor.policy.outcome import RankExit


class JoinedNodes:
    """Filled by the thread that listens to agents, read by others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, JoinedNode] = {}

    def __contains__(self, node: str) -> bool:
        return node in self._nodes

    def all(self) -> Mapping[str, JoinedNode]:
        """All that ever joined, by node, in this order."""
        with self._lock:
            return dict(self._nodes)

    def come(self, node: str, pid: int, joins: Joins) -> bool:
        """A node has joined, or its agent has connected again; whether that is another agent."""
        until = None if joins.seconds is None else time.monotonic() + joins.seconds
        with self._lock:
            known = self._nodes.get(node)
            another = known is None or known.pid != pid
            if another:
                self._nodes[node] = JoinedNode(joins.job, pid, until)
            return another

    def depart(self, node: str, departs: DepartureRequest) -> None:
        """Note that a node wants to leave."""
        by = time.monotonic() + departs.seconds
        with self._lock:
            if (known := self._nodes.get(node)) is not None:
                self._nodes[node] = replace(known, leaves_by=by, reason=departs.reason)


AWAY, HUNG_UP = 15.0, 1.0
"""Seconds after which an agent of another job whose link is over is not waited for; where its
process has ended, as a rule. One that lives connects at once, and can join again later."""

LEFT = "it has left the run"


class PoolLauncher(AgentLauncher):
    """Takes in nodes of other jobs, which come and go as their own jobs do.

    Slurm knows nothing of them in this job, so srun cannot be used there, only their agents. They
    get ranks at the next start. `fits` says with how many ranks the program can be started.
    """

    def __init__(
        self,
        allocation: Allocation,
        section: SuperviseSection,
        surroundings: Surroundings | None = None,
        fits: Callable[[int], bool] = lambda size: True,
    ) -> None:
        super().__init__(allocation, section, surroundings)
        self._joined, self._fits = JoinedNodes(), fits
        self._invited: tuple[Path, Invitation] | None = None

    def invite(self, invitation: Path) -> None:
        """Write the invitation. If that fails no node can join, and all else goes on."""
        if self._by_srun or self._program is None:
            return
        program, token = node_agent.program_text(self._program), self._agents.secret.token
        folder = str(Path.cwd())
        content = Invitation(self.addresses, self._agents.port, token, program, folder)
        try:
            content.write(invitation)
            self._invited = invitation, content
        except OSError as error:
            logger().warning("no other job can join this run", reason=error.strerror)

    def close(self) -> None:
        """As `AgentLauncher`, and remove the invitation."""
        invited, self._invited = self._invited, None
        super().close()
        if invited is not None:
            path, content = invited
            try:
                content.withdraw(path)
            except OSError as error:
                logger().warning("the invitation is still there", reason=error.strerror)

    @property
    def joined(self) -> Mapping[str, JoinedNode]:
        """All that ever joined."""
        return self._joined.all()

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes of the ranks, and those in reserve."""
        return (*super().nodes, *self._waiting())

    @property
    def idle(self) -> Idle:
        """Nodes to which the ranks could grow: spare ones of the job, if they have fewer of these
        than at first, and those that wait."""
        used = self._allocation.nodes
        missing = len(self._given.nodes) - len(self._of_job(used))
        at_most = self._most(max(0, missing) + len(self._there()), len(self._of_job(used)))
        if at_most <= len(used):
            return Idle()
        left_out = [n for n in self._allocation.spare if missing > 0 or n in self._joined]
        return Idle((*left_out, *self._waiting()), at_most - len(used))

    def _without_suspects(self, suspects: Collection[str]) -> Allocation:
        """As many of the job's own nodes as at first, and rank 0 on the first of them; then those
        that have joined."""
        now, there = self._allocation, self._there()
        sound = [node for node in there if node not in suspects]
        own = replace(now, nodes=self._of_job(now.nodes), spare=self._of_job(now.spare))
        own = avoid(own, suspects, max(0, self._least - len(sound)), len(self._given.nodes))
        added = self._most(len(sound), len(own.nodes)) - len(own.nodes)
        rest = [node for node in there if node not in sound[:added]]
        return replace(own, nodes=(*own.nodes, *sound[:added]), spare=(*own.spare, *rest))

    def _most(self, others: int, own: int) -> int:
        """The most nodes that can be used: `own` nodes of the job, and at most `others` more."""
        counts = range(own + others, own, -1)
        return next((count for count in counts if self._allows(count)), own)

    def _of_job(self, nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(node for node in nodes if node not in self._joined)

    def prepare_again(
        self, lost: Sequence[str], stuck: Mapping[str, Sequence[int]]
    ) -> CannotRestart | None:
        """As `AgentLauncher`, and release the nodes that want to leave."""
        unable = super().prepare_again(lost, stuck)
        for node, joined in self.joined.items():
            if joined.leaves_by is not None:
                self._agents.dismiss(node)
        return unable

    def look(self, node: str, pids: Sequence[int]) -> Sequence[str]:
        """By the node's agent, if it answers: srun cannot look at a node of another job."""
        return () if node in self._joined and not self._is_well(node) else super().look(node, pids)

    @property
    def _own_nodes(self) -> Sequence[str]:
        return self._of_job(self.nodes)

    @property
    def _least(self) -> int:
        used = len(self._allocation.nodes)
        return min(used, self._section.min_nodes or len(self._given.nodes))

    def _allows(self, nodes: int) -> bool:
        """Whether the program can be started on `nodes` nodes: always on up to those of the job."""
        return nodes <= len(self._given.nodes) or self._fits(
            nodes * self._allocation.tasks_per_node
        )

    def _there(self) -> list[str]:
        """The nodes of other jobs that could have ranks."""
        if self._by_srun:
            return []
        stay = (node for node, joined in self.joined.items() if joined.leaves_by is None)
        return [node for node in stay if self._is_well(node)]

    def _waiting(self) -> list[str]:
        known = {*self._allocation.nodes, *self._allocation.spare}
        return [node for node in self._there() if node not in known]

    def _refusal(self, hello: AgentHello) -> str:
        allocation, joins = self._allocation, hello.joins
        if hello.node in self._own_nodes:
            return f"{hello.node} belongs to job {allocation.job}, which trains there already"
        if allocation.uneven:
            return f"the nodes of job {allocation.job} have different numbers of GPUs"
        if joins is not None and joins.ranks < allocation.tasks_per_node:
            needed, room = allocation.tasks_per_node, joins.ranks
            return f"a node needs room for {needed} ranks, and {hello.node} has it for {room}"
        return ""

    def _hear(self, node: str, news: FleetNews) -> None:
        if isinstance(news, AgentConnected) and news.joins is not None:
            if self._joined.come(node, news.pid, news.joins):
                self._ranks.lose(node, None, self._was_killed())  # with the agent before
        elif isinstance(news, DepartureRequest):
            self._joined.depart(node, news)
            if node not in self._allocation.nodes:
                self._agents.dismiss(node)
        else:
            super()._hear(node, news)

    def _start_by_srun(
        self, launch: Launch, program: Program, post: Callable[[RankExit], None]
    ) -> None:
        """Without those that have joined; if that changes the ranks, they are all lost, and start
        again as fewer."""
        before, own = self._allocation, set(self._own_nodes)
        self._allocation = replace(before, nodes=tuple(n for n in before.nodes if n in own))
        if self._allocation.nodes == before.nodes:
            super()._start_by_srun(launch, program, post)
            return
        for rank in range(before.size):
            post(RankExit(rank, None))

    def _lost_nodes(
        self, accused: Collection[str], stuck: Mapping[str, Sequence[int]]
    ) -> dict[str, str]:
        """As `SrunLauncher`; of the others, those that are not there, whatever the reason."""
        own = set(self._own_nodes)
        found = super()._lost_nodes(
            own & set(accused), {node: pids for node, pids in stuck.items() if node in own}
        )
        there, allocation = set(self._there()) - stuck.keys(), self._allocation
        others = (n for n in (*allocation.nodes, *allocation.spare) if n in self._joined)
        return found | {node: LEFT for node in others if node not in there}

    def _is_gone(self, node: str) -> bool:
        if node not in self._joined:
            return super()._is_gone(node)
        seen = self._agents.seen(node)
        if seen is None or seen.linked:
            return seen is None
        return time.monotonic() - seen.went_at > (HUNG_UP if seen.hung_up else AWAY)

    def _remove_agent(self, node: str) -> None:
        if node not in self._joined:
            super()._remove_agent(node)

    def _give_up(self, node: str) -> None:
        """An agent of another job is sent away, and not waited for; whatever it still runs has no
        part in the run any more."""
        if node in self._joined:
            self._agents.dismiss(node)
            self._ranks.lose(node, None, self._was_killed())
        else:
            super()._give_up(node)
