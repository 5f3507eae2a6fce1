"""Ranks on this machine only: the agent is a thread of the supervisor."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import cast

from kempner.cluster.network.interfaces import Interface
from kempner.cluster.network.ports import free_port
from kempner.cluster.slurm.allocation import Allocation
from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.world import World
from kempner.config.sections import SuperviseSection
from kempner.run.control.launch_env import Launch
from kempner.run.link.auth import Secret
from kempner.run.link.messages import Post
from kempner.run.process.threads import keep_running
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.rank_hub import RankHub
from kempner.supervisor.launchers.agents.fleet import AgentConnected, Fleet, FleetNews, Hear
from kempner.supervisor.launchers.agents.messages import (
    AgentHello,
    LeaveOrder,
    TaskBinding,
    ToAgent,
)
from kempner.supervisor.launchers.agents.node_agent import NodeAgent
from kempner.supervisor.launchers.base import RANK_DEFAULTS, Program
from kempner.supervisor.launchers.children import Children
from kempner.supervisor.launchers.run_nodes import RunNodes

_LOOPBACK = "127.0.0.1"

AGENT_ENDS_WITHIN = 5.0
"""Seconds to wait for the agent's thread at the end."""


class LocalRankSetup:
    """Ranks get a signal when the supervisor dies."""

    gone_within, shows_all = 60.0, False

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    def environment(self, launch: Launch, master: tuple[str, int]) -> dict[str, str]:
        address, port = master
        meet = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        common = {**RANK_DEFAULTS, **os.environ, **launch.environment(), **meet}
        common.pop("TORCHELASTIC_RUN_ID", None)
        return common

    def place(self, world: World) -> dict[str, str]:
        return world.environment()

    def bindings(self, given: Sequence[TaskBinding], ranks: int) -> Sequence[TaskBinding]:
        return [TaskBinding()] * ranks


class LocalLink:
    """The agent's link: a call of `hear`."""

    def __init__(self, node: str, hear: Hear) -> None:
        self.say = cast("Callable[[object], None]", partial(hear, node))
        self._numbers = count(1)
        self.ranks = RankHub(self.say, here=True)

    def start(self) -> None:
        self.say(AgentConnected(0, 0, os.getpid()))

    def alone_for(self) -> float:
        return 0.0

    def post(self, make: Callable[[int], Post]) -> None:
        self.say(make(next(self._numbers)))


class AgentThread:
    """Runs an agent in a thread, in the place of an `AgentServer`."""

    port = 0

    def __init__(self, agent: NodeAgent, node: str, hear: Hear) -> None:
        link = LocalLink(node, hear)

        def serve() -> None:
            agent.run(link)

        self._agent, self._thread = agent, keep_running("agent", serve)

    def tell(self, node: str | None, message: ToAgent) -> None:
        self._agent.hear(message)

    def close(self) -> None:
        """Have the agent kill all ranks, and wait for it, but not for ranks that are stuck."""
        self._agent.hear(LeaveOrder())
        self._thread.join(AGENT_ENDS_WITHIN)


class LocalAgent:
    """The only agent of a run on one machine; as `SlurmAgents`, with nothing to start or lose."""

    here, killed_within, cleared_within = True, 5.0, 65.0
    addresses, takes_others, waits = (_LOOPBACK,), False, False

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._node = run, node_name(os.environ)
        self._children = Children()
        self.bound: dict[str, Interface | None] = {}

    def open(
        self,
        program: Program,
        hear: Callable[[str, FleetNews], None],
        refusal: Callable[[AgentHello], str],
        lost: Callable[[str, int | None], None],
    ) -> Fleet:

        def serve(secret: Secret, hear: Hear) -> AgentThread:
            ranks = LocalRankSetup(self._run)
            agent = NodeAgent(program, self._children, ranks, secret, self.addresses)
            return AgentThread(agent, self._node, hear)

        return Fleet((), 1, hear, refusal, serve)

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """As `Children.paused`."""
        with self._children.paused() as may_pause:
            yield may_pause

    def start_missing(self) -> None:
        pass

    def reach_by_srun(self, nodes: Collection[str]) -> None:
        pass

    def is_connected(self, node: str) -> bool:
        return True

    def is_gone(self, node: str) -> bool:
        return False

    def connect_timeout(self) -> float:
        return 0.0

    def end(self, node: str) -> None:
        pass

    def remove(self, node: str) -> None:
        pass

    def refusal_of(self, node: str) -> str:
        return ""

    def forget(self, node: str) -> None:
        pass

    def launch(self, launch: Launch) -> Launch:
        """`launch` with this process, at whose end the ranks get a signal."""
        return replace(launch, parent=os.getpid())

    def master(self, launch: Launch) -> tuple[str, int]:
        salt = f"{self._run.path.absolute()}:{launch.attempt.nonce}"
        return _LOOPBACK, free_port(_LOOPBACK, salt=salt)

    def bindings(self) -> Mapping[str, Sequence[TaskBinding]]:
        return {}

    def close(self, has_left: Callable[[str], bool]) -> None:
        pass


def this_machine(run: RunDirectory, size: int) -> tuple[RunNodes, LocalAgent]:
    """Nodes and agents for a launcher of `size` ranks on this machine. Each rank has a session of
    its own, so that a terminal's Ctrl-C reaches the supervisor only."""
    here = Allocation("", (node_name(os.environ),), size, None, 0, batch=False)
    return RunNodes(here, SuperviseSection()), LocalAgent(run)
