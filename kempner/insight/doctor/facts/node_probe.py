"""Measures a node for the doctor: `python -m kempner.insight.doctor.facts.node_probe QUESTION`.

It imports no torch; whether that can be imported is tried in a process of its own.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import os
import resource
import shutil
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from kempner.cluster.machine.limits import SHARED_WITHIN
from kempner.cluster.network.interfaces import (
    INFINIBAND,
    Interface,
    InterfaceNetwork,
    choose,
    read_interfaces,
    route_address,
)
from kempner.cluster.slurm.hostlist import node_name
from kempner.insight.doctor.facts.gpus import survey_gpus
from kempner.insight.doctor.facts.node import (
    FolderFacts,
    FolderQuestion,
    Limits,
    NetworkFacts,
    NetworkQuestion,
    NodeAnswer,
    NodeQuestion,
    WriteRate,
    answer_text,
    look_at_software,
    read_question,
    write_test,
)
from kempner.run.process.durable_io import comes_to_hold

SHM = "/dev/shm"

CONNECT_WITHIN = 3.0
"""Seconds for a connection to the doctor: within a cluster it takes milliseconds."""


def measure(question: NodeQuestion) -> NodeAnswer:
    """The answer of this node. The write test comes first: all nodes are to write at once."""
    node, asked_at = node_name(os.environ), time.time()
    target, write = Path(question.folders.written_to), None
    if question.folders.written_to and target.is_dir():  # or this node does not share it
        write = write_test(target, f"write-{node}", question.folders.writers)
    return NodeAnswer(
        node=node,
        time=asked_at,
        limits=_limits(),
        network=network_facts(question.network),
        folders=_folders(question.folders, node, write),
        gpus=survey_gpus(),
        software=look_at_software(question.imports),
    )


def _limits() -> Limits:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memory = psutil.virtual_memory()
    temporary = os.environ.get("TMPDIR") or "/tmp"
    shm_total, _, shm_free = _usage(SHM)
    return Limits(
        open_files=None if files == resource.RLIM_INFINITY else files,
        memlock=None if locked == resource.RLIM_INFINITY else locked,
        shm_total=shm_total,
        shm_free=shm_free,
        memory_total=memory.total,
        memory_free=memory.available,
        temporary=(temporary, _usage(temporary)[2]),
    )


def _usage(folder: str) -> tuple[int, int, int]:
    """All, used and free bytes; nothing where there is no such folder."""
    try:
        return shutil.disk_usage(folder)
    except OSError:
        return (0, 0, 0)


def _folders(question: FolderQuestion, node: str, write: WriteRate | None) -> FolderFacts:
    troubles = {each: _trouble_with(Path(each), node, question.nonce) for each in question.shared}
    return FolderFacts(
        troubles={folder: words for folder, words in troubles.items() if words},
        digests={file: _digest(Path(file)) for file in question.copies},
        caches={
            folder: words for folder in question.caches if (words := _cache_trouble(Path(folder)))
        },
        write=write,
    )


def _trouble_with(folder: Path, node: str, nonce: str) -> str:
    """Read there what the doctor has written, and write something for it to read."""
    question, content = folder / "doctor", nonce.encode()
    try:
        if not comes_to_hold(question, content, SHARED_WITHIN):
            return "is not the same folder as where kempner doctor runs"
        (folder / node).write_bytes(content)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    return ""


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _cache_trouble(folder: Path) -> str:
    if not folder.exists():
        return "is not there"
    return "" if os.access(folder, os.R_OK | os.X_OK) else "cannot be read"


def network_facts(question: NetworkQuestion) -> NetworkFacts:
    """The interface of this node's ranks, and whether the doctor can be reached through it."""
    try:
        interfaces = read_interfaces()
        choice = choose(
            interfaces,
            on_one_node=question.on_one_node,
            configured=question.interface,
            environ=os.environ,
            route_address=route_address(question.first) if question.first else "",
        )
    except (ValueError, OSError) as error:
        return NetworkFacts(None, trouble=str(error))
    facts = NetworkFacts(
        choice.interface,
        warning=choice.warning,
        infiniband=any(each.kind == INFINIBAND for each in interfaces),
    )
    return _meet(facts, question)


def _meet(facts: NetworkFacts, question: NetworkQuestion) -> NetworkFacts:
    """Ask the doctor for the time through the interface, where it has an address on its network."""
    bound = facts.interface
    if bound is None or bound.network is InterfaceNetwork.LOOPBACK:
        return facts
    there = _address_in_reach(bound, question.meet_at)
    if there is None:
        return facts
    own = bound.address.partition("/")[0]
    try:
        asked_at = time.time()
        with socket.create_connection((there, question.port), CONNECT_WITHIN, (own, 0)) as meeting:
            told = float(meeting.makefile().readline() or "nan")
        ahead = (asked_at + time.time()) / 2 - told
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        words = f"{there} cannot be reached from {own} ({bound.name}): {why}"
        return replace(facts, unreachable=words)
    return replace(facts, clock_ahead=None if math.isnan(ahead) else ahead)


def _address_in_reach(bound: Interface, addresses: tuple[str, ...]) -> str | None:
    """The one of the doctor's addresses that is on the interface's network."""
    network = ipaddress.ip_interface(bound.address).network
    found = (text.partition("/")[0] for text in addresses)
    return next((each for each in found if ipaddress.ip_address(each) in network), None)


if __name__ == "__main__":
    # At one go, or lines mix with other nodes' where Python's output is unbuffered.
    sys.stdout.write(answer_text(measure(read_question(sys.argv[1]))))
    sys.stdout.flush()
