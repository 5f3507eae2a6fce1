"""The nodes of ranks, as the lines of a log tell."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kempner.insight.triage.log.lines import LogLine

_COMMUNICATOR = re.compile(r"\brank (?P<rank>\d+) nranks (?P<world>\d+)")
_RING = re.compile(r"\bChannel \d+/\d+ :(?P<ring>(?:\s+\d+){2,19})\s*$")
"""A ring of NCCL, from the rank that prints it on (`dumpLine` in NCCL's graph/rings.cc)."""

_WORLD = re.compile(r"\bworld[_ ]size[\"']?\s*[=:]?\s*(\d+)|\bMEMBER: \d+/(\d+)")
_ADDRESS = re.compile(r"(?:Bootstrap|NET/\w+|OOB)\s?:? .*?[\w.]+:(\d+\.\d+\.\d+\.\d+)<\d+>")

_USES = re.compile(r"\bUsing (?:\[\d+\])?(?P<name>[\w.-]+):(?P<address>\d+\.\d+\.\d+\.\d+)<\d+>")
_OF_RAY = re.compile(r"\bip=(?P<node>[\d.]+), pid=(?P<pid>\d+)\) world_rank=(?P<rank>\d+)")
_VIRTUAL = re.compile(r"(?:docker|virbr|br-|veth|lxc|lxd|cni|flannel|podman|tun|tap)\S*$")
"""Interfaces that never lead to other nodes."""

_MOST = 100_000  # facts of a kind that are kept; a world is not larger


@dataclass
class Places:
    """Ranks, processes and addresses by node; a node's name counts up to its first dot."""

    nodes: dict[int, str] = field(default_factory=dict)
    ranks: dict[tuple[str, int], int] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    local_ranks: dict[tuple[str, int], int] = field(default_factory=dict)
    first_ranks: dict[str, int] = field(default_factory=dict)
    """By node: the rank of its local rank 0, as torchrun counts, which numbers a node in a row."""
    uses: dict[str, tuple[str, LogLine]] = field(default_factory=dict)
    """By node: the first address that NCCL uses there, and the line."""
    tasks: dict[int, str] = field(default_factory=dict)
    """By task of srun: its node."""
    highest: int = -1  # of the ranks that wrote a line
    world: int | None = None

    def learn(self, line: LogLine) -> None:
        text, rank = line.text, line.rank
        self.highest = max(self.highest, -1 if rank is None else rank)
        if line.node is not None:
            self._see(line.node)
            if (used := _USES.search(text)) is not None and len(self.uses) < _MOST:
                self.uses.setdefault(short(line.node), (f"{used['name']}:{used['address']}", line))
            if rank is not None and line.local_rank is not None and len(self.local_ranks) < _MOST:
                self.local_ranks[short(line.node), line.local_rank] = rank
            if "Using" in text and (found := _ADDRESS.search(text)) is not None:
                self.addresses[found[1]] = line.node
        if "world_rank=" in text and (ray := _OF_RAY.search(text)) is not None:
            self.place(int(ray["rank"]), ray["node"], int(ray["pid"]))
            return
        if (found := _COMMUNICATOR.search(text)) is not None:
            self.world = max(self.world or 0, int(found["world"]))
            rank = int(found["rank"]) if int(found["world"]) == self.world else rank
        elif (found := _RING.search(text)) is not None:
            ring = found["ring"].split()
            self.world = max(self.world or 0, len(ring))
            rank = int(ring[0]) if len(ring) == self.world else rank
        elif (found := _WORLD.search(text)) is not None:
            self.world = max(self.world or 0, int(found[1] or found[2]))
        if rank is not None and line.node is not None:
            self.place(rank, line.node, line.pid)

    def place(
        self, rank: int, node: str, pid: int | None = None, local_rank: int | None = None
    ) -> None:
        self._see(node)
        if len(self.nodes) < _MOST:
            self.nodes[rank] = node
            if pid is not None:
                self.ranks[short(node), pid] = rank
            if local_rank is not None:
                self.local_ranks[short(node), local_rank] = rank
                self.first_ranks[short(node)] = rank - local_rank

    def place_tasks(self) -> None:
        """Take srun's tasks for ranks, unless there is one on each node and more ranks."""
        nodes = {short(node) for node in self.tasks.values()}
        spread = {0, 1} <= self.tasks.keys() and len(nodes) == len(self.tasks)
        if spread and self.highest >= len(nodes):
            self.tasks.clear()
        for task, node in self.tasks.items():
            self.place(task, node)

    def _see(self, node: str) -> None:
        if len(self.seen) < _MOST:
            self.seen.setdefault(short(node), node)

    def rank_of(self, pid: int, node: str | None) -> int | None:
        """The rank of a process, on any node if none is named and the pid is unique."""
        if node is not None:
            return self.ranks.get((short(node), pid))
        found = {rank for (_, number), rank in self.ranks.items() if number == pid}
        return found.pop() if len(found) == 1 else None

    def rank_of_local(self, local_rank: int, node: str | None) -> int | None:
        """The rank of a local rank of a node, or of the only node if none is named; None if
        unknown."""
        node = self.only_node if node is None else node
        if node is None:
            return None
        known = self.local_ranks.get((short(node), local_rank))
        first = self.first_ranks.get(short(node))
        return first + local_rank if known is None and first is not None else known

    @property
    def isolated_interface(self) -> LogLine | None:
        """The line that names an interface of NCCL without a route to the other nodes, if there are
        several: a bridge for containers or virtual machines, or an address that two nodes share.
        """
        if len(self.uses) < 2:
            return None
        interfaces = [used for used, _ in self.uses.values()]
        for used, line in self.uses.values():
            name, _, address = used.partition(":")
            shared = sum(other.endswith(f":{address}") for other in interfaces) > 1
            if _VIRTUAL.match(name) or shared:
                return line
        return None

    @property
    def only_node(self) -> str | None:
        return next(iter(self.seen.values())) if len(self.seen) == 1 else None


def short(node: str) -> str:
    """A node's name up to its first dot; an address as it is."""
    return node if re.fullmatch(r"[\d.]+", node) else node.partition(".")[0]


def same_node(one: str | None, other: str | None) -> bool:
    """Whether two names are of one node, with or without its domain."""
    return one is not None and other is not None and short(one) == short(other)
