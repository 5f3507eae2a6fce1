"""The ranks that agents have started, and of which the supervisor awaits the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from kempner.supervisor.policy.outcome import RankExit


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
