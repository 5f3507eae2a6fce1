"""The site where a project will train (Slurm's partitions and accounts, this machine's interfaces,
kempner's Python environment), and the choices for batch scripts."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TypeVar

from kempner.cluster.network.interfaces import InterfaceNetwork, read_interfaces
from kempner.cluster.slurm.command import SlurmError, SlurmMissingError, ask
from kempner.cluster.slurm.resources import count_gpus
from kempner.run.output.units import count

_CONTAINERS = {"APPTAINER_CONTAINER": "apptainer", "SINGULARITY_CONTAINER": "singularity"}
_BASE = re.compile(r"^home\s*=\s*(\S.*?)\s*$", re.MULTILINE)
_MADE_BY_UV = re.compile(r"^uv\s*=", re.MULTILINE)


@dataclass(frozen=True)
class Facts:
    """Facts about the running Python and its shell: its path and `sys.prefix`, the shell's
    `variables`, the text of `pyvenv.cfg` (empty without), and whether the prefix is one of conda or
    mamba."""

    python: str
    prefix: str
    variables: Mapping[str, str]
    venv: str = ""
    conda: bool = False


@dataclass(frozen=True)
class Environment:
    """How a job gets the `python` with kempner: what it is (`kinds`), `lines` of bash to run
    before, and the command of the `container` around it."""

    python: str
    kinds: Sequence[str] = ()
    lines: Sequence[str] = ()
    container: Sequence[str] = ()

    def script(self) -> str:
        value = shlex.quote(self.python)
        return "".join(
            f"{line}\n" for line in (*self.lines, f"KEMPNER_PYTHON=${{KEMPNER_PYTHON:-{value}}}")
        )


def recognise(facts: Facts) -> Environment:
    """Recognise modules, a conda, mamba, uv or plain virtual environment, or a container."""
    for variable, program in _CONTAINERS.items():
        if image := facts.variables.get(variable):
            return Environment(
                facts.python, [f"container {image}"], (), (program, "exec", "--nv", image)
            )
    modules = [name for name in facts.variables.get("LOADEDMODULES", "").split(":") if name]
    kinds = [f"modules {' '.join(modules)}"] if modules else []
    lines = _module_lines(modules, facts.variables.get("MODULESHOME", ""))
    if facts.venv:
        kinds.append(f"{'uv' if _MADE_BY_UV.search(facts.venv) else 'venv'} {facts.prefix}")
        if base := _BASE.search(facts.venv):
            lines.append(
                f"# Every node must see {facts.prefix}, and {base[1]}, which it is made of."
            )
    elif facts.conda:
        kinds.append(f"conda {facts.prefix}")
        lines += _conda_lines(facts)
    return Environment(facts.python, kinds, lines)


def _module_lines(modules: Sequence[str], home: str) -> list[str]:
    """The lines that load modules; a batch script is not a login shell, and may not know
    `module`."""
    if not modules:
        return []
    known = (
        [f"type module &>/dev/null || source {shlex.quote(f'{home}/init/bash')}"] if home else []
    )
    return [*known, f"module load {shlex.join(modules)}"]


def _conda_lines(facts: Facts) -> list[str]:
    """The lines that activate the environment by conda if found, else by micromamba or mamba."""
    prefix, parent = shlex.quote(facts.prefix), PurePath(facts.prefix).parent
    conda, mamba = (facts.variables.get(name, "") for name in ("CONDA_EXE", "MAMBA_EXE"))
    if mamba and not conda:
        name = PurePath(mamba).name
        return [
            f'eval "$({shlex.quote(mamba)} shell hook --shell bash)"',
            f"{name} activate {prefix}",
        ]
    root = PurePath(conda).parents[1] if conda else parent.parent
    if not conda and parent.name != "envs":
        return []
    script = shlex.quote(str(root / "etc/profile.d/conda.sh"))
    return [f"source {script}", f"conda activate {prefix}"]


DAY = 24 * 60 * 60
"""Seconds that a job requests if the partition allows it."""

_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class NodeKind:
    """`count` equal nodes of a partition, each with these CPUs and GPUs. `limit` is the partition's
    time limit in Slurm's form (`7-00:00:00`, `infinite`)."""

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
    """An account for a user's jobs; for one `partition` only, unless that is empty."""

    name: str
    partition: str = ""


@dataclass(frozen=True)
class Site:
    """What was found. `environment` has kempner. `fabric` is this machine's interface to the
    compute network, empty without one. `default_account` is Slurm's default for this user.
    `trouble` says why Slurm could not be asked; empty if it answered."""

    environment: Environment
    fabric: str = ""
    kinds: tuple[NodeKind, ...] = ()
    accounts: tuple[Account, ...] = ()
    default_account: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class Request:
    """What the scripts request for each job; `others` are the other kinds of nodes."""

    kind: NodeKind
    account: str
    other_accounts: tuple[str, ...]
    others: tuple[NodeKind, ...]

    @property
    def ranks_per_node(self) -> int:
        return self.kind.gpus or 1

    @property
    def cpus_per_rank(self) -> int:
        return max(1, self.kind.cpus // self.ranks_per_node)

    @property
    def time(self) -> str:
        seconds = parse_limit(self.kind.limit)
        return self.kind.limit if seconds is not None and seconds < DAY else "24:00:00"


def choose(site: Site) -> Request | None:
    """What to request; None if no partition is known. Prefers partitions that are up, then nodes
    with GPUs, then the default partition, then the most frequent kind of node."""
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
    """Merge equal kinds: sinfo prints a line for each state of nodes."""
    counts: dict[NodeKind, int] = {}
    for kind in kinds:
        alike = replace(kind, count=0)
        counts[alike] = counts.get(alike, 0) + kind.count
    return tuple(replace(kind, count=count) for kind, count in counts.items())


def parse_limit(text: str) -> int | None:
    """Seconds of `7-00:00:00`, `24:00:00` or `30:00`; None for anything else."""
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
    """Find out about the site, asking everything once. Never raises."""
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
    """This user's accounts, and Slurm's default; empty without accounting."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        return (), ""
    common = ["sacctmgr", "--noheader", "--parsable2", "show"]
    given = _ask([*common, "assoc", f"user={user}", "format=Account,Partition"], read_accounts)
    default = _ask([*common, "user", f"name={user}", "format=DefaultAccount"], _first_line)
    return given or (), default or ""


def read_accounts(text: str) -> tuple[Account, ...] | None:
    """The accounts in sacctmgr's answer, lines of `account|partition`."""
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
    prefix = Path(sys.prefix)
    try:
        venv = (prefix / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not a virtual environment
        venv = ""
    conda = (prefix / "conda-meta").is_dir()
    return recognise(Facts(sys.executable, sys.prefix, os.environ, venv, conda))


def _fabric() -> str:
    try:
        interfaces = read_interfaces()
    except OSError:
        return ""
    fabric = (i.name for i in interfaces if i.usable and i.network is InterfaceNetwork.FABRIC)
    return next(fabric, "")
