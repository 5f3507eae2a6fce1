"""Over what each rank talks to other nodes, from NCCL's own lines (NCCL_DEBUG=INFO)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kempner.insight.triage.log.lines import LogLine
from kempner.insight.triage.places import Places

_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (?P<a>\d+)\[[^]]*\] -> (?P<b>\d+)\[[^]]*\] "
    r"\[(?P<way>send|receive)\] via NET/(?P<net>[\w-]+)"
)
_NETWORK = re.compile(r"Using network (?P<net>[\w-]+)")


@dataclass
class Transports:
    """The networks of every rank that said one: `IB`, `Socket`, or a plugin's name."""

    by_rank: dict[int, set[str]] = field(default_factory=dict)
    _by_process: dict[tuple[str, int], str] = field(default_factory=dict)

    def learn(self, line: LogLine) -> None:
        """Take in a line of NCCL."""
        if (found := _CHANNEL.search(line.text)) is not None:
            rank = int(found["a"] if found["way"] == "send" else found["b"])
            self.by_rank.setdefault(rank, set()).add(found["net"])
        elif (found := _NETWORK.search(line.text)) is not None:
            if line.rank is not None:
                self.by_rank.setdefault(line.rank, set()).add(found["net"])
            elif line.node is not None and line.pid is not None:
                self._by_process[line.node, line.pid] = found["net"]

    def table(self, places: Places) -> dict[int, str]:
        """Rank to network, the slower one where a rank has both."""
        for (node, pid), net in self._by_process.items():
            rank = places.rank_of(pid, node)
            if rank is not None:
                self.by_rank.setdefault(rank, set()).add(net)
        return {
            rank: "Socket" if "Socket" in nets else min(nets)
            for rank, nets in sorted(self.by_rank.items())
        }
