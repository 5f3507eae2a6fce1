"""Asks all nodes at once, and looks whether what each of them writes is seen here."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kempner.cluster.network.interfaces import read_interfaces
from kempner.cluster.network.ports import candidates, claim
from kempner.cluster.slurm.allocation import Allocation
from kempner.cluster.slurm.node_step import NO_GPUS, run_on_nodes
from kempner.probe import node as probe
from kempner.probe.details import IMPORT_WITHIN
from kempner.probe.node import DetailQuestion, ProbeQuestion, ProbeResult, marked

ASK_WITHIN = IMPORT_WITHIN + 60.0
"""Seconds that all nodes together get: as long as the slowest import of torch, and the rest."""


@dataclass(frozen=True)
class NodeQuestions:
    """What to ask nodes about: `shared` folders, in the first of which the checkpoints go; `write`
    is whether to test how fast they write; `details` as in `ProbeQuestion`."""

    shared: tuple[str, ...]
    write: bool = True
    interface: str | None = None
    details: DetailQuestion = field(default_factory=DetailQuestion)


@dataclass(frozen=True)
class Survey:
    """What the nodes told: `asked` are all, `during` is when they were asked and had answered.

    `unseen` are folders by node that do not show here what the node wrote there; `unwritable` are
    clauses by folder that the doctor itself cannot write to; `complaints` are srun's own.
    `gpus_hidden` is whether no step could be given the GPUs of the job.
    """

    asked: tuple[str, ...]
    answers: tuple[ProbeResult, ...]
    during: tuple[float, float]
    unseen: dict[str, tuple[str, ...]]
    unwritable: dict[str, str]
    complaints: str = ""
    gpus_hidden: bool = False
    shared: tuple[str, ...] = ()  # the folders about whose marks they were asked


def survey_here(wanted: NodeQuestions) -> Survey:
    with _asking(wanted, 1) as (question, unwritable):
        began = time.time()
        answer = probe.measure(question)
        during, shared = (began, time.time()), question.folders
        return Survey((answer.node,), (answer,), during, {}, unwritable, shared=shared)


def survey_nodes(wanted: NodeQuestions, allocation: Allocation) -> Survey:
    """Ask all nodes of an allocation, spare ones included, in one step of srun."""
    nodes = (*allocation.nodes, *allocation.spare)
    gpus = allocation.gpus_per_node
    resources = (f"--gpus-per-node={gpus}",) if gpus else NO_GPUS
    inside = None if allocation.batch else allocation.job
    with listening() as (meet_at, port):
        first = allocation.nodes[0]
        met = replace(wanted.details, first=first, meet_at=meet_at, port=port)
        wanted = replace(wanted, details=met)
        with _asking(wanted, len(nodes)) as (question, unwritable):
            task, began = probe.command(question), time.time()
            told = run_on_nodes(nodes, inside, task, ASK_WITHIN, resources)
            hidden = bool(gpus) and not told.out
            if hidden:  # not every step can be given the GPUs of a job
                told = run_on_nodes(nodes, inside, task, ASK_WITHIN)
            during, shared = (began, time.time()), question.folders
            place = {node: number for number, node in enumerate(nodes)}
            found = probe.read_results(told.out.splitlines())
            answers = tuple(sorted(found, key=lambda answer: place.get(answer.node, len(place))))
            unseen = {
                answer.node: tuple(str(Path(folder).parent) for folder in missing)
                for answer in answers
                if (missing := tuple(probe.unseen(question, answer)))
            }
    return Survey(nodes, answers, during, unseen, unwritable, told.complaints, hidden, shared)


@contextmanager
def _asking(wanted: NodeQuestions, nodes: int) -> Iterator[tuple[ProbeQuestion, dict[str, str]]]:
    """What to ask, and what cannot be written, while a hidden folder is in each shared one."""
    nonce = secrets.token_hex(8)
    folders = [Path(folder) / f".kempner-doctor-{nonce}" for folder in wanted.shared]
    with marked(folders, nonce) as unwritable:
        usable = tuple(str(folder) for folder in folders if str(folder) not in unwritable)
        first = str(folders[0]) if wanted.write and folders else ""
        written_to = first if first in usable else ""
        details = replace(wanted.details, written_to=written_to, writers=nodes)
        asker = "where kempner doctor runs"
        question = ProbeQuestion(
            nonce, usable, wanted.interface, nodes == 1, asker=asker, details=details
        )
        yield question, {str(Path(folder).parent): why for folder, why in unwritable.items()}


@contextmanager
def listening() -> Iterator[tuple[tuple[str, ...], int]]:
    """A port that sends the time to each client, and the addresses of this machine."""
    try:
        listener = claim(candidates(secrets.token_hex(8)))
    except OSError:
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
