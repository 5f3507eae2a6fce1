"""The nodes of a run (those of its job, and of other jobs that have joined), and its running
ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from kempner.cluster.slurm.allocation import Allocation, avoid, without
from kempner.config.sections import SuperviseSection
from kempner.run.link.messages import Joins
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.supervisor.launchers.agents.messages import AgentHello, DepartureRequest
from kempner.supervisor.launchers.base import Idle, JoinedNode
from kempner.supervisor.policy.outcome import RankExit

NO_OTHERS = "this run takes no nodes of other jobs (supervise.grow=false)"


class RunNodes:
    """Which nodes have ranks, and which are spare.

    Nodes of other jobs get ranks at the next start, after those of the job. `fits` returns whether
    the program can run with a number of ranks; None if no nodes of other jobs can join."""

    def __init__(
        self,
        allocation: Allocation,
        section: SuperviseSection,
        fits: Callable[[int], bool] | None = None,
    ) -> None:
        self.allocation = self._given = allocation
        self._section, self._fits = section, fits
        self.joined: Mapping[str, JoinedNode] = {}
        """All nodes of other jobs that have ever joined, in this order. Replaced, not changed, by
        the agents' thread; other threads read it."""
        self.is_well: Callable[[str], bool] = lambda node: False
        """Whether a node's agent has sent a message recently; set by the launcher."""

    @property
    def all(self) -> tuple[str, ...]:
        """The nodes with ranks, spare nodes, and joined nodes that wait for ranks."""
        return (*self._held, *self._waiting())

    @property
    def own(self) -> tuple[str, ...]:
        """The job's nodes, with ranks and spare."""
        return self._of_job(self._held)

    @property
    def outside(self) -> str | None:
        """The job id if this process is not the job's batch process, else None."""
        return None if self.allocation.batch else self.allocation.job

    @property
    def in_order(self) -> list[str]:
        """The job's nodes with ranks, in the job's order."""
        given = (*self._given.nodes, *self._given.spare)
        return sorted(self._of_job(self.allocation.nodes), key=given.index)

    @property
    def takes_others(self) -> bool:
        return self._fits is not None

    @property
    def idle(self) -> Idle:
        """The nodes onto which the run could grow: joined nodes that wait, and spare nodes if the
        ranks have fewer of the job's nodes than wanted."""
        used = self.allocation.nodes
        own = len(self._of_job(used))
        missing = max(0, self._wanted - own)
        at_most = self._most(missing + len(self.there()), own)
        if at_most <= len(used):
            return Idle()
        left_out = [n for n in self.allocation.spare if missing > 0 or n in self.joined]
        return Idle((*left_out, *self._waiting()), at_most - len(used))

    @property
    def least(self) -> int:
        """The number of nodes that another start needs."""
        used = len(self.allocation.nodes)
        return min(used, self._section.min_nodes or len(self._given.nodes))

    def join(self, node: str, pid: int, joins: Joins) -> bool:
        """Note that a node has joined, or that its agent has reconnected; whether the agent is a
        new one."""
        until = None if joins.seconds is None else time.monotonic() + joins.seconds
        known = self.joined.get(node)
        another = known is None or known.pid != pid
        if another:
            self.joined = {**self.joined, node: JoinedNode(joins.job, pid, until)}
        return another

    def depart(self, node: str, departs: DepartureRequest) -> None:
        """Note that a node has asked to leave."""
        by = time.monotonic() + departs.seconds
        if (known := self.joined.get(node)) is not None:
            leaves = replace(known, leaves_by=by, reason=departs.reason)
            self.joined = {**self.joined, node: leaves}

    def there(self) -> list[str]:
        """The nodes of other jobs that are present and stay."""
        stay = (node for node, joined in self.joined.items() if joined.leaves_by is None)
        return [node for node in stay if self.is_well(node)]

    def lose(self, gone: Collection[str]) -> None:
        """Remove nodes; spare nodes take their place."""
        self.allocation = without(self.allocation, gone)

    def avoid(self, suspects: Mapping[str, str]) -> None:
        """Give these nodes, each with a reason, no ranks, if other nodes or fewer nodes suffice."""
        self.allocation = self._without_suspects(suspects)
        for node in self.all if self._given.job else ():
            if node in suspects:
                what = "used anyway" if node in self.allocation.nodes else "left out"
                logger().warning(f"{node} is suspect, and {what}: {suspects[node]}")

    def unavoidable(self, suspects: Collection[str]) -> list[str]:
        """The suspects that get ranks anyway: no spare node replaces them, and
        `supervise.min_nodes` does not allow fewer. Empty on a single machine, which has no
        alternative."""
        if not self._given.job:
            return []
        return [n for n in self._without_suspects(suspects).nodes if n in suspects]

    def refusal(self, hello: AgentHello) -> str:
        """Why an agent of another job cannot join; empty if it can."""
        allocation, joins = self.allocation, hello.joins
        if not self.takes_others:
            return NO_OTHERS
        if hello.node in self.own:
            return f"{hello.node} belongs to job {allocation.job}, which trains there already"
        if allocation.uneven:
            return f"the nodes of job {allocation.job} have different numbers of GPUs"
        if joins is not None and joins.ranks < allocation.tasks_per_node:
            needed, room = allocation.tasks_per_node, joins.ranks
            return f"a node needs room for {needed} ranks, and {hello.node} has it for {room}"
        return ""

    @property
    def _held(self) -> tuple[str, ...]:
        return (*self.allocation.nodes, *self.allocation.spare)

    @property
    def _wanted(self) -> int:
        """The number of the job's nodes that get ranks, if enough are sound."""
        used = len(self._of_job(self.allocation.nodes))
        return len(self._given.nodes) if self._section.grow else used

    def _without_suspects(self, suspects: Collection[str]) -> Allocation:
        """The allocation with as few suspects as possible: first the job's own nodes, as many as
        wanted, with rank 0 on the first; then joined nodes."""
        now, there = self.allocation, self.there()
        sound = [node for node in there if node not in suspects]
        own = replace(now, nodes=self._of_job(now.nodes), spare=self._of_job(now.spare))
        own = avoid(own, suspects, max(0, self.least - len(sound)), self._wanted)
        added = self._most(len(sound), len(own.nodes)) - len(own.nodes)
        rest = [node for node in there if node not in sound[:added]]
        return replace(own, nodes=(*own.nodes, *sound[:added]), spare=(*own.spare, *rest))

    def _most(self, others: int, own: int) -> int:
        """The largest number of nodes with which the program can run: `own` nodes of the job and at
        most `others` more."""
        counts = range(own + others, own, -1)
        return next((count for count in counts if self._allows(count)), own)

    def _allows(self, nodes: int) -> bool:
        """Whether the program can run on `nodes` nodes; always on up to the job's own number."""
        if nodes <= len(self._given.nodes) or self._fits is None:
            return True
        return self._fits(nodes * self.allocation.tasks_per_node)

    def _of_job(self, nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(node for node in nodes if node not in self.joined)

    def _waiting(self) -> list[str]:
        return [node for node in self.there() if node not in self._held]


class RunningRanks:
    """The ranks that were started and whose end is not known, with their nodes."""

    def __init__(self) -> None:
        self._left: dict[int, str] = {}
        self._post: Callable[[RankExit], None] = lambda end: None
        self._lock = threading.Lock()

    def begin(self, places: Mapping[str, Sequence[int]], post: Callable[[RankExit], None]) -> None:
        """The ranks in `places`, by node, are being started."""
        with self._lock:
            self._left = {rank: node for node, ranks in places.items() for rank in ranks}
            self._post = post

    def nodes(self) -> Sequence[str]:
        """The nodes of these ranks, in rank order."""
        with self._lock:
            return tuple(dict.fromkeys(self._left.values()))

    def end(self, end: RankExit) -> None:
        """Remove a rank and post its end, once."""
        with self._lock:
            known = self._left.pop(end.rank, None) is not None
        if known:
            self._post(end)

    def lose(self, node: str, status: int | None, ended_by_us: bool, refusal: str = "") -> None:
        """Post the end of all ranks on a node: they are lost, or were never started because of a
        `refusal`."""
        with self._lock:
            lost = [rank for rank, where in self._left.items() if where == node]
        for rank in lost:
            self.end(RankExit(rank, status, ended_by_us, refusal, unstarted=bool(refusal)))


class TorchrunEnds:
    """Posts the ends of all `ranks` once the torchruns of all nodes have ended. The exit code of a
    torchrun that fails says little about its ranks, so they get none; the ranks report more over
    the control channel."""

    def __init__(self, nodes: int, ranks: int, post: Callable[[RankExit], None]) -> None:
        self._nodes, self._ranks, self._post = nodes, ranks, post
        self._ends: list[RankExit] = []
        self._lock = threading.Lock()

    def post(self, end: RankExit) -> None:
        """A torchrun has ended."""
        with self._lock:
            self._ends.append(end)
            ends = list(self._ends)
        if len(ends) < self._nodes:
            return
        statuses = {end.status for end in ends}
        status = statuses.pop() if len(statuses) == 1 else None
        ours = any(end.ended_by_us for end in ends)
        for rank in range(self._ranks):
            if status in (ExitCode.COMPLETED, ExitCode.STOPPED):
                self._post(RankExit(rank, status))
            else:
                self._post(RankExit(rank, None, ended_by_us=ours))
