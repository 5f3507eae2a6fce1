"""Ranks on this machine: its agent is a thread of the supervisor."""

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
from kempner.supervisor.launchers.base import TELLING, Program
from kempner.supervisor.launchers.children import Children
from kempner.supervisor.launchers.run_nodes import RunNodes

_LOOPBACK = "127.0.0.1"

LEAVES_WITHIN = 5.0
"""Seconds to wait for the agent at the end."""


class RanksOfSupervisor:
    """Each is told when the supervisor dies, so none outlives it unnoticed."""

    gone_within, shows_all = 60.0, False

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    def environment(self, launch: Launch, master: tuple[str, int]) -> dict[str, str]:
        """Ranks that meet on this machine."""
        address, port = master
        meet = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        common = {**TELLING, **os.environ, **launch.environment(), **meet}
        common.pop("TORCHELASTIC_RUN_ID", None)
        return common

    def place(self, world: World) -> dict[str, str]:
        """Under torch's names."""
        return world.environment()

    def bindings(self, told: Sequence[TaskBinding], ranks: int) -> Sequence[TaskBinding]:
        """To nothing."""
        return [TaskBinding()] * ranks


class LinkHere:
    """What the agent says is heard at once."""

    def __init__(self, node: str, hear: Hear) -> None:
        self.say = cast("Callable[[object], None]", partial(hear, node))
        self._numbers = count(1)
        self.ranks = RankHub(self.say, here=True)

    def start(self) -> None:
        """The agent is there."""
        self.say(AgentConnected(0, 0, os.getpid()))

    def alone_for(self) -> float:
        """Never: both are one process."""
        return 0.0

    def post(self, make: Callable[[int], Post]) -> None:
        """Have it heard, which cannot fail."""
        self.say(make(next(self._numbers)))


class ThreadOfAgent:
    """Runs an agent, as a server would that it is connected to."""

    port = 0

    def __init__(self, agent: NodeAgent, node: str, hear: Hear) -> None:
        link = LinkHere(node, hear)

        def serve() -> None:
            agent.run(link)

        self._agent, self._thread = agent, keep_running("agent", serve)

    def tell(self, node: str | None, message: ToAgent) -> None:
        """Hand it to the agent."""
        self._agent.hear(message)

    def close(self) -> None:
        """Have the agent end all that is left, and wait for it; not for what is stuck."""
        self._agent.hear(LeaveOrder())
        self._thread.join(LEAVES_WITHIN)


class AgentHere:
    """The only agent of a run."""

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
        """Start it."""

        def serve(secret: Secret, hear: Hear) -> ThreadOfAgent:
            ranks = RanksOfSupervisor(self._run)
            agent = NodeAgent(program, self._children, ranks, secret, self.addresses)
            return ThreadOfAgent(agent, self._node, hear)

        return Fleet((), 1, hear, refusal, serve)

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """In this block the ranks stand still, and this process may do so, too."""
        with self._children.paused() as may_pause:
            yield may_pause

    def have(self) -> None:
        """It is there."""

    def reach_by_srun(self, nodes: Collection[str]) -> None:
        """It is reached."""

    def is_connected(self, node: str) -> bool:
        """Always."""
        return True

    def is_gone(self, node: str) -> bool:
        """Never: it ends with this process."""
        return False

    def time_to_come(self) -> float:
        """None: it is there."""
        return 0.0

    def end(self, node: str) -> None:
        """It goes on."""

    def remove(self, node: str) -> None:
        """It stays."""

    def refusal_of(self, node: str) -> str:
        """None: it needs no step."""
        return ""

    def forget(self, node: str) -> None:
        """It stays."""

    def launch(self, launch: Launch) -> Launch:
        """The process with which the ranks end."""
        return replace(launch, parent=os.getpid())

    def master(self, launch: Launch) -> tuple[str, int]:
        """A port of this machine."""
        salt = f"{self._run.path.absolute()}:{launch.attempt.nonce}"
        return _LOOPBACK, free_port(_LOOPBACK, salt=salt)

    def bindings(self) -> Mapping[str, Sequence[TaskBinding]]:
        """None."""
        return {}

    def close(self, has_left: Callable[[str], bool]) -> None:
        """It has ended with its link."""


def this_machine(run: RunDirectory, size: int) -> tuple[RunNodes, AgentHere]:
    """For a launcher of `size` ranks here, each in a session of its own: a terminal's Ctrl-C
    reaches the supervisor alone."""
    here = Allocation("", (node_name(os.environ),), size, None, 0, batch=False)
    return RunNodes(here, SuperviseSection()), AgentHere(run)
