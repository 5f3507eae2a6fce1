"""Health probe that runs on each node before ranks start; measures only.

`python -m kempner.supervisor.nodes.probe QUESTION` prints one line of JSON. It imports neither
torch nor the configuration, so that it takes a moment where a rank takes seconds to start.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from kempner.cluster.machine.fitness import SHARED_WITHIN
from kempner.cluster.network.interfaces import Interface, choose
from kempner.cluster.network.netinfo import read_interfaces
from kempner.cluster.slurm.hostlist import node_name
from kempner.run.process.durable_io import await_entry, holds

SHM = "/dev/shm"


@dataclass(frozen=True)
class ProbeQuestion:
    """What to check: `folders` that all nodes share; in each of them the supervisor has written
    `nonce`; `interface` as configured; `on_one_node` if the ranks need no network.
    """

    nonce: str
    folders: tuple[str, ...]
    interface: str | None
    on_one_node: bool


@dataclass(frozen=True)
class ProbeResult:
    """A node's answer. Sizes are in bytes, `time` in seconds since the epoch by the node's clock.

    `disk_free` is by folder; `open_files` is the most that a process may have, None without a
    limit; `troubles` are sentences, by what they are about.
    """

    node: str
    time: float
    memory_free: int
    memory_total: int
    disk_free: dict[str, int]
    open_files: int | None
    interface: Interface | None
    troubles: dict[str, str]


_QUESTION = TypeAdapter(ProbeQuestion)
_VITALS = TypeAdapter(ProbeResult)


def question_text(question: ProbeQuestion) -> str:
    """A question as an argument for this module's command."""
    return _QUESTION.dump_json(question).decode()


def read_result(line: str) -> ProbeResult | None:
    """The vitals on a line of output; None if it is something else."""
    try:
        return _VITALS.validate_json(line)
    except ValueError:
        return None


def answer_text(question: str) -> str:
    """The line that answers a question's text; nothing to none."""
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
    return ProbeResult(
        node=node,
        time=time.time(),
        memory_free=memory.available,
        memory_total=memory.total,
        disk_free=_disk_free(troubles),
        open_files=None if hard == resource.RLIM_INFINITY else hard,
        interface=interface,
        troubles=troubles,
    )


def _trouble_with(folder: Path, node: str, nonce: str) -> str:
    """Read there what the supervisor has written, and write something for it to read."""
    question, content = folder / "supervisor", nonce.encode()
    try:
        if not await_entry(question, SHARED_WITHIN) or not holds(question, content):
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


def _disk_free(troubles: dict[str, str]) -> dict[str, int]:
    free = {}
    for folder in (os.environ.get("TMPDIR") or "/tmp", SHM):
        try:
            free[folder] = shutil.disk_usage(folder).free
        except OSError as error:
            troubles[folder] = f"{folder} cannot be used: {error.strerror}"
    return free


if __name__ == "__main__":
    # At one go, or it mixes with other nodes' where Python's output is unbuffered.
    sys.stdout.write(answer_text(sys.argv[1]) + "\n")
    sys.stdout.flush()
