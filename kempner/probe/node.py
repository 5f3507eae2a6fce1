"""Measures a node: `python -m kempner.probe.node QUESTION`, or by the node's agent.

The answer is in lines that srun does not mix. This module imports neither torch nor the
configuration, which would take seconds.

Every node is asked before each attempt; `kempner doctor` asks for more.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from kempner.cluster.machine import SHARED_WITHIN, run_shell
from kempner.cluster.network.interfaces import (
    INFINIBAND,
    Interface,
    InterfaceNetwork,
    choose,
    read_interfaces,
    route_address,
)
from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.slurm.node_step import in_lines, whole_answers
from kempner.probe.details import (
    GpuSurvey,
    Software,
    WriteRate,
    look_at_software,
    survey_gpus,
    write_test,
)
from kempner.run.process.durable_io import adapter_of, as_names, as_text, comes_to_hold
from kempner.run.process.worker_process import SAFE_MODULE

_PACKAGE = Path(__file__).parents[1]

_SHOWN = 8
"""Digits of a hash in a sentence."""


@dataclass(frozen=True)
class CodeIdentity:
    """Versions of Python and of torch, empty without torch, and a hexadecimal hash of kempner's
    files."""

    python: str
    code: str
    torch: str = ""

    def __str__(self) -> str:
        torch = f", torch {self.torch}" if self.torch else ""
        return f"kempner's code {self.code[:_SHOWN]} on Python {self.python}{torch}"


def code_identity(package: Path = _PACKAGE) -> CodeIdentity:
    """The identity of this process's code. Raises `OSError` if the files cannot be read."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package)}\0{len(content)}\0".encode())
        total.update(content)
    try:
        torch = version("torch")  # as it is installed: importing it would take seconds
    except PackageNotFoundError:
        torch = ""
    return CodeIdentity(platform.python_version(), total.hexdigest(), torch)


def other_code(found: Mapping[str, CodeIdentity], first: str) -> dict[str, str]:
    """A sentence for each node whose code is not that of the majority; of equally frequent ones
    that of the `first` node counts."""
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

SITE_CHECK, INTERFACE = "site check", "interface"
"""Keys of troubles with `hooks.before_start` and with the network."""

MARK = "asked"
"""The file in a shared folder that a node must see."""

CONNECT_WITHIN = 3.0
"""Seconds for a connection to the doctor: within a cluster it takes milliseconds."""


@dataclass(frozen=True)
class SiteCheck:
    """`hooks.before_start`: a shell command, its time limit in seconds, and its variables."""

    command: str
    seconds: float
    facts: dict[str, str]


@dataclass(frozen=True)
class DetailQuestion:
    """Further checks for the doctor: `copies` are files whose content must be the same everywhere,
    `caches` folders that must be readable, `imports` modules to import besides torch. A short write
    test goes to `written_to`, empty for none, while `writers` nodes do the same. `first` is the
    node of rank 0; the doctor listens at `port` on the addresses `meet_at`, with prefix length."""

    copies: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    written_to: str = ""
    writers: int = 1
    first: str = ""
    meet_at: tuple[str, ...] = ()
    port: int = 0


@dataclass(frozen=True)
class ProbeQuestion:
    """Checks of a node: of `folders` that all nodes share, in each of which `MARK` holds `nonce`;
    of the network, with `interface` as configured, unless all ranks are `on_one_node`; the site's
    own. `asker` says in sentences where the folders were marked. Only with `details` does the
    answer have details, whose measurement takes seconds to minutes."""

    nonce: str
    folders: tuple[str, ...]
    interface: str | None
    on_one_node: bool
    site_check: SiteCheck | None = None
    asker: str = "on the supervisor's node"
    details: DetailQuestion | None = None


@dataclass(frozen=True)
class ProbedMemory:
    """A node's available and total memory in bytes."""

    free: int
    total: int


@dataclass(frozen=True)
class NetworkDetails:
    """`warning` is about a node's interface; `unreachable` says why the doctor's address on that
    network does not answer. `clock_ahead` is the offset of the node's clock from the doctor's in
    seconds, None if unknown."""

    warning: str = ""
    unreachable: str = ""
    infiniband: bool = False
    clock_ahead: float | None = None


@dataclass(frozen=True)
class ProbeDetails:
    """`temporary` is the folder of temporary files. Sizes are in bytes; `locked_memory` is the soft
    limit, None without one. `digests` are hashes of the copies, empty for one that cannot be read;
    `caches` are clauses about folders that cannot be used."""

    temporary: str = ""
    shm_total: int = 0
    locked_memory: int | None = None
    network: NetworkDetails = NetworkDetails()
    digests: dict[str, str] = field(default_factory=dict)
    caches: dict[str, str] = field(default_factory=dict)
    write: WriteRate | None = None
    gpus: GpuSurvey = field(default_factory=GpuSurvey)
    software: Software = field(default_factory=Software)


@dataclass(frozen=True)
class ProbeResult:
    """A node's answer. Sizes are in bytes, `time` in seconds since the epoch by the node's clock.
    `disk_free` is by folder; `open_files` is the limit per process, None without one; `interface`
    is the one that ranks would bind to, None if that is left to Gloo or impossible; `code` is None
    if it cannot be read; `troubles` are sentences by subject."""

    node: str
    time: float
    memory: ProbedMemory
    disk_free: dict[str, int]
    open_files: int | None
    interface: Interface | None
    troubles: dict[str, str]
    code: CodeIdentity | None = None
    details: ProbeDetails = ProbeDetails()


def question_text(question: ProbeQuestion) -> str:
    return adapter_of(ProbeQuestion).dump_json(as_text(question)).decode()


def command(question: ProbeQuestion) -> list[str]:
    return [sys.executable, *SAFE_MODULE, __name__, question_text(question)]


def read_result(text: str | bytes) -> ProbeResult | None:
    try:
        return as_names(adapter_of(ProbeResult).validate_json(text))
    except ValueError:
        return None


def read_results(lines: Iterable[str]) -> list[ProbeResult]:
    """The complete answers in the output of a step's tasks."""
    return [found for text in whole_answers(lines) if (found := read_result(text)) is not None]


def answer_text(question: str) -> str:
    """The answer to a question, both as text; empty for an empty question."""
    if not question:
        return ""
    asked = as_names(adapter_of(ProbeQuestion).validate_json(question))
    return adapter_of(ProbeResult).dump_json(as_text(measure(asked))).decode()


def answer_lines(result: ProbeResult) -> str:
    return in_lines(result.node, adapter_of(ProbeResult).dump_json(as_text(result)))


@contextmanager
def marked(folders: Sequence[Path], nonce: str) -> Iterator[dict[str, str]]:
    """Create these folders, each with a mark for nodes to see, and remove them afterwards; yields
    the errors by folder."""
    unwritable = {}
    try:
        for folder in folders:
            try:
                folder.mkdir(parents=True)
                (folder / MARK).write_text(nonce)
            except OSError as error:
                unwritable[str(folder)] = error.strerror or str(error)
        yield unwritable
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def unseen(question: ProbeQuestion, result: ProbeResult) -> Iterator[str]:
    """The folders in which the node's file does not become visible here."""
    for folder in question.folders:
        path = Path(folder) / result.node
        wrote = folder not in result.troubles
        if wrote and not comes_to_hold(path, question.nonce.encode(), SHARED_WITHIN):
            yield folder


def measure(question: ProbeQuestion) -> ProbeResult:
    """The answer of this node; a failed measurement is one of the troubles. The write test comes
    first, since all nodes should write at once, and the slowest measurements last."""
    troubles: dict[str, str] = {}
    node, details = node_name(os.environ), question.details
    write = None if details is None else _write(details, node)
    for folder in question.folders:
        if trouble := _trouble_with(Path(folder), node, question):
            troubles[folder] = trouble
    interface, network = examine_network(question, troubles)
    memory = psutil.virtual_memory()
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    temporary = os.environ.get("TMPDIR") or "/tmp"
    disks = _disks((temporary, SHM), troubles)
    if question.site_check is not None:
        _run_site_check(question.site_check, node, troubles)
    result = ProbeResult(
        node=node,
        time=time.time(),
        memory=ProbedMemory(memory.available, memory.total),
        disk_free={folder: free for folder, (_, free) in disks.items()},
        open_files=None if files == resource.RLIM_INFINITY else files,
        interface=interface,
        troubles=troubles,
        code=_code(troubles),
    )
    if details is None:
        return result
    shm_total, _ = disks.get(SHM, (0, 0))
    given = ProbeDetails(temporary, shm_total, network=network, write=write)
    return replace(result, details=_look_closely(details, given))


def _look_closely(details: DetailQuestion, given: ProbeDetails) -> ProbeDetails:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return replace(
        given,
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        digests={file: _digest(Path(file)) for file in details.copies},
        caches={each: words for each in details.caches if (words := _cache_trouble(Path(each)))},
        gpus=survey_gpus(),
        software=look_at_software(details.imports),
    )


def _write(details: DetailQuestion, node: str) -> WriteRate | None:
    target = Path(details.written_to)
    if not (details.written_to and target.is_dir()):  # this node does not share it
        return None
    return write_test(target, f"write-{node}", details.writers)


def _run_site_check(check: SiteCheck, node: str, troubles: dict[str, str]) -> None:
    facts = {**check.facts, "KEMPNER_NODE": node}
    if failure := run_shell(check.command, facts, check.seconds).failure:
        troubles[SITE_CHECK] = f"hooks.before_start failed there: {failure}"


def _trouble_with(folder: Path, node: str, question: ProbeQuestion) -> str:
    """Read the asker's mark in a folder, and write a file for it to read; a sentence if that
    fails."""
    content = question.nonce.encode()
    try:
        if not comes_to_hold(folder / MARK, content, SHARED_WITHIN):
            return f"{folder.parent} is not the same folder as {question.asker}"
        (folder / node).write_bytes(content)
    except OSError as error:
        return f"{folder.parent} cannot be used: {error.strerror}"
    return ""


def examine_network(
    question: ProbeQuestion, troubles: dict[str, str]
) -> tuple[Interface | None, NetworkDetails]:
    """The interface of this node's ranks, and whether the doctor can be reached through it."""
    details = question.details or DetailQuestion()
    try:
        interfaces = read_interfaces()
        choice = choose(
            interfaces,
            on_one_node=question.on_one_node,
            configured=question.interface,
            environ=os.environ,
            route_address=route_address(details.first) if details.first else "",
        )
    except (ValueError, OSError) as error:
        troubles[INTERFACE] = str(error)
        return None, NetworkDetails()
    infiniband = any(each.kind == INFINIBAND for each in interfaces)
    found = NetworkDetails(choice.warning, infiniband=infiniband)
    bound = choice.interface
    if bound is None or bound.network is InterfaceNetwork.LOOPBACK:
        return bound, found
    there = _address_in_reach(bound, details.meet_at)
    return bound, found if there is None else _meet(found, bound, there, details.port)


def _meet(found: NetworkDetails, bound: Interface, there: str, port: int) -> NetworkDetails:
    """Ask the doctor for the time through the interface."""
    own = bound.address.partition("/")[0]
    try:
        asked_at = time.time()
        with socket.create_connection((there, port), CONNECT_WITHIN, (own, 0)) as meeting:
            doctor_time = float(meeting.makefile().readline() or "nan")
        ahead = (asked_at + time.time()) / 2 - doctor_time
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        words = f"{there} cannot be reached from {own} ({bound.name}): {why}"
        return replace(found, unreachable=words)
    return replace(found, clock_ahead=None if math.isnan(ahead) else ahead)


def _address_in_reach(bound: Interface, addresses: tuple[str, ...]) -> str | None:
    """The one of the doctor's addresses that is on the interface's network."""
    if not addresses:
        return None
    network = ipaddress.ip_interface(bound.address).network
    found = (text.partition("/")[0] for text in addresses)
    return next((each for each in found if ipaddress.ip_address(each) in network), None)


def _code(troubles: dict[str, str]) -> CodeIdentity | None:
    try:
        return code_identity()
    except OSError as error:
        troubles["code"] = f"{error.filename} cannot be read: {error.strerror}"
        return None


def _disks(folders: Sequence[str], troubles: dict[str, str]) -> dict[str, tuple[int, int]]:
    found = {}
    for folder in folders:
        try:
            total, _, free = shutil.disk_usage(folder)
            found[folder] = total, free
        except OSError as error:
            troubles[folder] = f"{folder} cannot be used: {error.strerror}"
    return found


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _cache_trouble(folder: Path) -> str:
    if not folder.exists():
        return "is not there"
    return "" if os.access(folder, os.R_OK | os.X_OK) else "cannot be read"


if __name__ == "__main__":
    # In one write, or lines mix with those of other nodes where Python's output is unbuffered.
    sys.stdout.write(in_lines(node_name(os.environ), answer_text(sys.argv[1]).encode()))
    sys.stdout.flush()
