"""What is known of the place where a project will train, and the choices that follow from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kempner.run.output.units import count

DAY = 24 * 60 * 60
"""Seconds that a job asks for where the partition allows it."""

_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class NodeKind:
    """Equal nodes of a partition: `count` of them, each with so many CPUs and GPUs.

    `limit` is the longest that a job may take there, as Slurm spells it (`7-00:00:00`, `infinite`).
    """

    partition: str
    default: bool
    up: bool
    limit: str
    count: int
    cpus: int
    gpus: int

    def described(self) -> str:
        """Such as `low (default): 8 nodes of 4 GPUs and 8 CPUs, at most 2:00:00`."""
        gpus = f"{count(self.gpus, 'GPU')} and " if self.gpus else ""
        parts = [
            f"{self.partition}{' (default)' if self.default else ''}: "
            f"{count(self.count, 'node')} of {gpus}{count(self.cpus, 'CPU')}",
            "" if self.limit == "infinite" else f"at most {self.limit}",
            "" if self.up else "down",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Account:
    """A name that a user's jobs are charged to; in one partition only, unless that is empty."""

    name: str
    partition: str = ""


@dataclass(frozen=True)
class Site:
    """What was found. `trouble` is why nothing was asked of Slurm, or could be; empty if it could.

    `python` is the interpreter that has kempner, `fabric` this machine's interface to the compute
    network, empty without one. `default_account` is Slurm's choice for this user.
    """

    python: str
    fabric: str = ""
    kinds: tuple[NodeKind, ...] = ()
    accounts: tuple[Account, ...] = ()
    default_account: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class Request:
    """What the scripts ask of Slurm for each job; `others` are kinds of nodes that they do not."""

    kind: NodeKind
    account: str
    other_accounts: tuple[str, ...]
    others: tuple[NodeKind, ...]

    @property
    def ranks_per_node(self) -> int:
        """One per GPU, or one where there are none."""
        return self.kind.gpus or 1

    @property
    def cpus_per_rank(self) -> int:
        """A fair share of a node's."""
        return max(1, self.kind.cpus // self.ranks_per_node)

    @property
    def time(self) -> str:
        """A day, or less where the partition allows no more."""
        seconds = parse_limit(self.kind.limit)
        return self.kind.limit if seconds is not None and seconds < DAY else "24:00:00"


def choose(site: Site) -> Request | None:
    """What to ask for: None where nothing is known of any partition.

    The default partition, unless it has no GPUs while another one has; in it the nodes that have
    GPUs, and of those the kind that there is most of.
    """
    if not site.kinds:
        return None
    kind = max(site.kinds, key=lambda k: (k.up, k.gpus > 0, k.default, k.count))
    usable = [a.name for a in site.accounts if a.partition in ("", kind.partition)]
    accounts = tuple(dict.fromkeys(usable))
    account = site.default_account if site.default_account in accounts else ""
    if not account and accounts:
        account = accounts[0]
    return Request(
        kind=kind,
        account=account,
        other_accounts=tuple(name for name in accounts if name != account),
        others=tuple(other for other in site.kinds if other != kind),
    )


def merged(kinds: Sequence[NodeKind]) -> tuple[NodeKind, ...]:
    """Each kind once: sinfo has a line for each state that nodes are in, too."""
    counts: dict[NodeKind, int] = {}
    for kind in kinds:
        alike = NodeKind(**{**vars(kind), "count": 0})
        counts[alike] = counts.get(alike, 0) + kind.count
    return tuple(NodeKind(**{**vars(kind), "count": count}) for kind, count in counts.items())


def parse_limit(text: str) -> int | None:
    """Seconds of `7-00:00:00`, `24:00:00` or `30:00`; None for what is no limit."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found[4] is None and found[1] is None:  # minutes and seconds
        return 60 * first + second
    return DAY * days + 3600 * first + 60 * second + third
