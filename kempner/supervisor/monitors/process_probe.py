"""What is known from outside of processes that may be stuck, here and on other nodes."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kempner.run.process.threads import start_thread
from kempner.supervisor.control.events import Connected
from kempner.supervisor.nodes.presence import came_after, still_runs
from kempner.supervisor.nodes.process_look import of_process

NOT_KILLED = "does not end though it was killed: it is stuck in the kernel"

NODES_ASKED = 8
"""Nodes that are asked about their processes; of the others the first few are typical."""


def is_here(host: str) -> bool:
    """Whether a host or node of that name is this one."""
    here = platform.node()
    return host in (here, here.partition(".")[0])


def local_processes(joined: Mapping[int, Connected]) -> dict[int, Connected]:
    """Those of the ranks whose processes run on this host, whatever they have said."""
    return {rank: there for rank, there in joined.items() if _runs_here(there)}


def describe_stuck(rank: int, there: Connected) -> str:
    """What is known of a rank that outlives its SIGKILL; empty if it is seen to be gone."""
    here = is_here(there.host)
    if here and not _runs_here(there):
        return ""
    seen = f" ({of_process(there.pid)})" if here else ""
    return f"rank {rank}, process {there.pid}, {NOT_KILLED}{seen}"


def _runs_here(there: Connected) -> bool:
    """Whether a rank's process is on this host, and has not ended."""
    ours = is_here(there.host) and came_after(there.pid, os.getpid())
    return ours and still_runs(there.pid)


class ProcessLook:
    """A look at processes, by node: `lines` grows as nodes answer.

    Those of this node are in it at once; `ask` asks another one, and returns what it says.
    """

    def __init__(
        self,
        where: Mapping[str, Sequence[int]],
        ask: Callable[[str, Sequence[int]], Sequence[str]],
    ) -> None:
        self._ask_node = ask
        self.lines = [
            of_process(pid) for host, pids in where.items() if is_here(host) for pid in pids
        ]
        others = [host for host in where if not is_here(host)]
        self._asked = [
            start_thread(f"ask {host}", partial(self._ask, host, where[host]))
            for host in others[:NODES_ASKED]
        ]

    @property
    def complete(self) -> bool:
        """Whether every node that was asked has answered, or will not."""
        return not any(thread.is_alive() for thread in self._asked)

    def _ask(self, node: str, pids: Sequence[int]) -> None:
        told = self._ask_node(node, pids)
        self.lines.extend(f"{node}: {line}" for line in told or ["no answer"])
