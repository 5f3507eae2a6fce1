"""Health probe that runs on each node before ranks start; measures only.

`python -m kempner.supervisor.nodes.probe QUESTION` prints the answer in lines that srun does not
mix. It imports neither torch nor the configuration, so that it takes a moment where a rank takes
seconds to start.

Which code a node runs: a hash of kempner's own files, the versions of its Python and torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from kempner.cluster.machine.limits import SHARED_WITHIN
from kempner.cluster.machine.shell_command import run_shell
from kempner.cluster.network.interfaces import Interface, choose, read_interfaces
from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.slurm.node_step import in_lines
from kempner.run.process.durable_io import comes_to_hold

_PACKAGE = Path(__file__).parents[2]

_SHOWN = 8
"""Digits of a hash that a sentence shows."""


@dataclass(frozen=True)
class CodeIdentity:
    """`python` and `torch` are versions, that of torch empty where there is none; `code` is a hash
    of kempner's files, hexadecimal."""

    python: str
    code: str
    torch: str = ""

    def __str__(self) -> str:
        torch = f", torch {self.torch}" if self.torch else ""
        return f"kempner's code {self.code[:_SHOWN]} on Python {self.python}{torch}"


def code_identity(package: Path = _PACKAGE) -> CodeIdentity:
    """Of this process. Raises `OSError` if the package's files cannot be read."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package)}\0{len(content)}\0".encode())
        total.update(content)
    return CodeIdentity(platform.python_version(), total.hexdigest(), _torch())


def _torch() -> str:
    """As it is installed: importing it would take seconds."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def other_code(found: Mapping[str, CodeIdentity], first: str) -> dict[str, str]:
    """The nodes whose code is not that of most, each with a sentence.

    Of several that as many have, that of the `first` node counts.
    """
    if len(set(found.values())) < 2:
        return {}
    counts = Counter(found.values())
    usual = max(counts, key=lambda code: (counts[code], code == found.get(first)))
    return {
        node: f"it runs {code}, and the other nodes {usual}"
        for node, code in found.items()
        if code != usual
    }


SHM = "/dev/shm"

SITE_CHECK = "site check"
"""What a trouble with `hooks.before_start` is about."""


@dataclass(frozen=True)
class SiteCheck:
    """`hooks.before_start`: a shell command, the seconds that it gets, and its variables."""

    command: str
    seconds: float
    facts: dict[str, str]


@dataclass(frozen=True)
class ProbeQuestion:
    """What to check: `folders` that all nodes share; in each of them the supervisor has written
    `nonce`; `interface` as configured; `on_one_node` if the ranks need no network. The site's own
    check comes last.
    """

    nonce: str
    folders: tuple[str, ...]
    interface: str | None
    on_one_node: bool
    site_check: SiteCheck | None = None


@dataclass(frozen=True)
class ProbedMemory:
    """A node's memory in bytes: what a process could still have, and all."""

    free: int
    total: int


@dataclass(frozen=True)
class ProbeResult:
    """A node's answer. Sizes are in bytes, `time` in seconds since the epoch by the node's clock.

    `disk_free` is by folder; `open_files` is the most that a process may have, None without a
    limit; `code` is what it runs, None where that cannot be read; `troubles` are sentences, by what
    they are about.
    """

    node: str
    time: float
    memory: ProbedMemory
    disk_free: dict[str, int]
    open_files: int | None
    interface: Interface | None
    troubles: dict[str, str]
    code: CodeIdentity | None = None


_QUESTION = TypeAdapter(ProbeQuestion)
_VITALS = TypeAdapter(ProbeResult)


def question_text(question: ProbeQuestion) -> str:
    """A question as an argument for this module's command."""
    return _QUESTION.dump_json(question).decode()


def read_result(text: str | bytes) -> ProbeResult | None:
    """The vitals in an answer's text; None if it is something else."""
    try:
        return _VITALS.validate_json(text)
    except ValueError:
        return None


def answer_text(question: str) -> str:
    """The text that answers a question's; nothing to none."""
    if not question:
        return ""
    return _VITALS.dump_json(measure(_QUESTION.validate_json(question))).decode()


def measure(question: ProbeQuestion) -> ProbeResult:
    """The vitals of this node. Whatever cannot be measured is one of the troubles."""
    troubles: dict[str, str] = {}
    node = node_name(os.environ)
    for folder in question.folders:
        if trouble := _trouble_with(Path(folder), node, question.nonce):
            troubles[folder] = trouble
    interface = _interface(question, troubles)
    memory = psutil.virtual_memory()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    disk_free = _disk_free(troubles)
    if question.site_check is not None:
        _run_site_check(question.site_check, node, troubles)
    return ProbeResult(
        node=node,
        time=time.time(),
        memory=ProbedMemory(memory.available, memory.total),
        disk_free=disk_free,
        open_files=None if hard == resource.RLIM_INFINITY else hard,
        interface=interface,
        troubles=troubles,
        code=_code(troubles),
    )


def _run_site_check(check: SiteCheck, node: str, troubles: dict[str, str]) -> None:
    facts = {**check.facts, "KEMPNER_NODE": node}
    if failure := run_shell(check.command, facts, check.seconds).failure:
        troubles[SITE_CHECK] = f"hooks.before_start failed there: {failure}"


def _trouble_with(folder: Path, node: str, nonce: str) -> str:
    """Read there what the supervisor has written, and write something for it to read."""
    question, content = folder / "supervisor", nonce.encode()
    try:
        if not comes_to_hold(question, content, SHARED_WITHIN):
            return f"{folder.parent} is not the same folder as on the supervisor's node"
        (folder / node).write_bytes(content)
    except OSError as error:
        return f"{folder.parent} cannot be used: {error.strerror}"
    return ""


def _interface(question: ProbeQuestion, troubles: dict[str, str]) -> Interface | None:
    try:
        choice = choose(
            read_interfaces(),
            on_one_node=question.on_one_node,
            configured=question.interface,
            environ=os.environ,
            route_address="",
        )
    except (ValueError, OSError) as error:
        troubles["interface"] = str(error)
        return None
    return choice.interface


def _code(troubles: dict[str, str]) -> CodeIdentity | None:
    try:
        return code_identity()
    except OSError as error:
        troubles["code"] = f"{error.filename} cannot be read: {error.strerror}"
        return None


def _disk_free(troubles: dict[str, str]) -> dict[str, int]:
    free = {}
    for folder in (os.environ.get("TMPDIR") or "/tmp", SHM):
        try:
            free[folder] = shutil.disk_usage(folder).free
        except OSError as error:
            troubles[folder] = f"{folder} cannot be used: {error.strerror}"
    return free


if __name__ == "__main__":
    # At one go, or lines mix with other nodes' where Python's output is unbuffered.
    sys.stdout.write(in_lines(node_name(os.environ), answer_text(sys.argv[1]).encode()))
    sys.stdout.flush()
