"""What is known of the place where a project will train, and the choices that follow from it.

Finds out about the site: Slurm's partitions and accounts, and this machine's interfaces.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kempner.cluster.network.interfaces import InterfaceNetwork, read_interfaces
from kempner.cluster.slurm.command import SlurmError, SlurmMissingError, ask
from kempner.cluster.slurm.resources import count_gpus
from kempner.project.environment import Environment, Facts, recognise
from kempner.run.output.units import count

DAY = 24 * 60 * 60
"""Seconds that a job asks for where the partition allows it."""

_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class NodeKind:
    """Equal nodes of a partition: `count` of them, each with the same CPUs and GPUs.

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

    `environment` has kempner. `fabric` is this machine's interface to the compute network, empty
    without one. `default_account` is Slurm's choice for this user.
    """

    environment: Environment
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


T = TypeVar("T")

_SINFO = ["sinfo", "--noheader", "--exact", "--format=%P|%a|%l|%D|%c|%G"]


def find_site() -> Site:
    """What can be found out here, each thing asked once. Never raises."""
    environment, fabric = _environment(), _fabric()
    try:
        kinds = ask(_SINFO, read_kinds)
    except SlurmMissingError:
        return Site(environment, fabric, trouble="there is no Slurm here")
    except SlurmError:
        return Site(environment, fabric, trouble="sinfo gives no answer here")
    accounts, default = _accounts()
    return Site(environment, fabric, kinds, accounts, default)


def read_kinds(text: str) -> tuple[NodeKind, ...] | None:
    """The kinds of nodes in an answer to `_SINFO`; None if it is empty or cut off."""
    if not text.endswith("\n"):
        return None
    try:
        return merged([_kind(line) for line in text.splitlines()]) or None
    except ValueError:
        return None


def _kind(line: str) -> NodeKind:
    name, available, limit, count, cpus, resources = line.split("|")
    return NodeKind(
        partition=name.rstrip("*"),
        default=name.endswith("*"),
        up=available == "up",
        limit=limit,
        count=int(count),
        cpus=int(cpus.rstrip("+")),
        gpus=count_gpus(resources) if "gpu" in resources else 0,
    )


def _accounts() -> tuple[tuple[Account, ...], str]:
    """What this user's jobs may be charged to, and Slurm's choice; nothing without accounting."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # one that the system has no name for
        return (), ""
    common = ["sacctmgr", "--noheader", "--parsable2", "show"]
    given = _ask([*common, "assoc", f"user={user}", "format=Account,Partition"], read_accounts)
    default = _ask([*common, "user", f"name={user}", "format=DefaultAccount"], _first_line)
    return given or (), default or ""


def read_accounts(text: str) -> tuple[Account, ...] | None:
    """The accounts in sacctmgr's answer, a line `account|partition` for each."""
    if not text.endswith("\n"):
        return None
    pairs = [line.partition("|") for line in text.splitlines()]
    return tuple(dict.fromkeys(Account(name, where) for name, _, where in pairs if name))


def _first_line(text: str) -> str | None:
    return text.splitlines()[0] if text.endswith("\n") else None


def _ask(command: Sequence[str], read: Callable[[str], T | None]) -> T | None:
    try:
        return ask(command, read)
    except SlurmError:
        return None


def _environment() -> Environment:
    """The one that this Python is in."""
    prefix = Path(sys.prefix)
    try:
        venv = (prefix / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it is no virtual environment
        venv = ""
    conda = (prefix / "conda-meta").is_dir()
    return recognise(Facts(sys.executable, sys.prefix, os.environ, venv, conda))


def _fabric() -> str:
    """This machine's interface to the compute network; empty if none is known."""
    try:
        interfaces = read_interfaces()
    except OSError:
        return ""
    fabric = (i.name for i in interfaces if i.usable and i.network is InterfaceNetwork.FABRIC)
    return next(fabric, "")
