"""Finds out about the site: Slurm's partitions and accounts, and this machine's interfaces."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kempner.cluster.network.interfaces import Network
from kempner.cluster.network.netinfo import read_interfaces
from kempner.cluster.slurm.command import SlurmError, SlurmMissingError, ask
from kempner.cluster.slurm.resources import count_gpus
from kempner.project.environment import Environment, Facts, recognise
from kempner.project.site import Account, NodeKind, Site, merged

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
    fabric = (i.name for i in interfaces if i.usable and i.network is Network.FABRIC)
    return next(fabric, "")
