"""Asks all nodes at once, and looks whether what each of them writes is seen here."""

from __future__ import annotations

import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kempner.cluster.machine.limits import SHARED_WITHIN
from kempner.cluster.network.interfaces import read_interfaces
from kempner.cluster.network.ports import candidates, claim
from kempner.cluster.slurm.allocation import Allocation
from kempner.cluster.slurm.node_step import NO_GPUS, run_on_nodes
from kempner.insight.doctor.facts import node_probe
from kempner.insight.doctor.facts.node import (
    IMPORT_WITHIN,
    FolderQuestion,
    NetworkQuestion,
    NodeAnswer,
    NodeQuestion,
    question_text,
    read_answers,
)
from kempner.run.process.durable_io import comes_to_hold
from kempner.run.process.worker_process import SAFE_MODULE

ASK_WITHIN = IMPORT_WITHIN + 60.0
"""Seconds that all nodes together get: as long as the slowest import of torch, and the rest."""


@dataclass(frozen=True)
class NodeQuestions:
    """What to ask nodes about: `shared` folders, in the first of which the checkpoints go; `copies`
    and `caches` as in `FolderQuestion`; `write` is whether to test how fast they write."""

    shared: tuple[str, ...]
    copies: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    write: bool = True
    imports: tuple[str, ...] = ()
    interface: str | None = None


@dataclass(frozen=True)
class Survey:
    """What the nodes told: `asked` are all, `during` is when they were asked and had answered.

    `unseen` are folders by node that do not show here what the node wrote there; `unwritable` are
    clauses by folder that the doctor itself cannot write to; `complaints` are srun's own.
    `gpus_hidden` is whether no step could be given the GPUs of the job.
    """

    asked: tuple[str, ...]
    answers: tuple[NodeAnswer, ...]
    during: tuple[float, float]
    unseen: dict[str, tuple[str, ...]]
    unwritable: dict[str, str]
    complaints: str = ""
    gpus_hidden: bool = False


def survey_here(wanted: NodeQuestions) -> Survey:
    """Ask this machine alone."""
    with _marked(wanted, 1) as (question, unwritable):
        began = time.time()
        answer = node_probe.measure(question)
        return Survey((answer.node,), (answer,), (began, time.time()), {}, unwritable)


def survey_nodes(wanted: NodeQuestions, allocation: Allocation) -> Survey:
    """Ask all nodes of an allocation, spare ones included, in one step of srun."""
    nodes = (*allocation.nodes, *allocation.spare)
    gpus = allocation.gpus_per_node
    resources = (f"--gpus-per-node={gpus}",) if gpus else NO_GPUS
    with _marked(wanted, len(nodes)) as (question, unwritable), listening() as (addresses, port):
        network = NetworkQuestion(
            wanted.interface, len(nodes) == 1, allocation.nodes[0], addresses, port
        )
        asked = question_text(replace(question, network=network))
        task = [sys.executable, *SAFE_MODULE, node_probe.__name__, asked]
        inside = None if allocation.batch else allocation.job
        began = time.time()
        told = run_on_nodes(nodes, inside, task, ASK_WITHIN, resources)
        hidden = bool(gpus) and not told.out
        if hidden:  # not every step can be given the GPUs of a job
            told = run_on_nodes(nodes, inside, task, ASK_WITHIN)
        during = (began, time.time())
        place = {node: number for number, node in enumerate(nodes)}
        found = read_answers(told.out)
        answers = tuple(sorted(found, key=lambda answer: place.get(answer.node, len(place))))
        unseen = {
            answer.node: missing
            for answer in answers
            if (missing := tuple(_unseen(question.folders, answer)))
        }
    return Survey(nodes, answers, during, unseen, unwritable, told.complaints, hidden)


@contextmanager
def _marked(wanted: NodeQuestions, writers: int) -> Iterator[tuple[NodeQuestion, dict[str, str]]]:
    """A hidden folder in each of the shared ones, with something for nodes to read; gone after."""
    nonce, unwritable, made = secrets.token_hex(8), {}, []
    try:
        for folder in wanted.shared:
            marked = Path(folder) / f".kempner-doctor-{nonce}"
            try:
                marked.mkdir()
                made.append(marked)
                (marked / "doctor").write_text(nonce)
            except OSError as error:
                unwritable[folder] = error.strerror or str(error)
        usable = tuple(str(path) for path in made if str(path.parent) not in unwritable)
        write_to = f"{wanted.shared[0]}/.kempner-doctor-{nonce}" if wanted.shared else ""
        folders = FolderQuestion(
            nonce,
            usable,
            wanted.copies,
            wanted.caches,
            write_to if wanted.write and write_to in usable else "",
            writers,
        )
        network = NetworkQuestion(interface=wanted.interface)
        yield NodeQuestion(folders, network, wanted.imports), unwritable
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def listening() -> Iterator[tuple[tuple[str, ...], int]]:
    """A port that sends the time to each client, and the addresses of this machine."""
    listener: socket.socket | None = None
    with suppress(OSError):
        listener = claim(candidates(secrets.token_hex(8)))
    if listener is None:
        yield (), 0
        return
    with listener:
        threading.Thread(target=_accept, args=(listener,), name="meet", daemon=True).start()
        addresses = tuple(each.address for each in read_interfaces() if each.usable)
        yield addresses, listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket) -> None:
    with suppress(OSError):  # it is closed in the end
        while True:
            caller, _ = listener.accept()
            with caller, suppress(OSError):  # this one hung up; the next one may not
                caller.sendall(f"{time.time()}\n".encode())


def _unseen(question: FolderQuestion, answer: NodeAnswer) -> Iterator[str]:
    """Folders in which what a node has written does not come to be seen here."""
    for folder in question.shared:
        if folder in answer.folders.troubles:
            continue
        path = Path(folder) / answer.node
        if not comes_to_hold(path, question.nonce.encode(), SHARED_WITHIN):
            yield str(path.parent.parent)
