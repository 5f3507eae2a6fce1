"""The nodes of other jobs that have joined, and what is known of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from kempner.supervisor.launchers.agents.messages import DepartureRequest, Joins
from kempner.supervisor.launchers.base import JoinedNode


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
