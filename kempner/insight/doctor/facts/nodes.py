"""Probes all nodes at once, and checks whether the files that each writes are visible here."""

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
"""Seconds for all nodes together: the slowest import of torch, and a minute for the rest."""


@dataclass(frozen=True)
class NodeQuestions:
    """What to ask nodes: about `shared` folders, the first of which is for checkpoints; with
    `write`, how fast they write; `details` as in `ProbeQuestion`."""

    shared: tuple[str, ...]
    write: bool = True
    interface: str | None = None
    details: DetailQuestion = field(default_factory=DetailQuestion)


@dataclass(frozen=True)
class Survey:
    """The answers of the nodes. `asked` are all nodes, `during` the times before and after.
    `unseen` has by node the folders in which its files are not visible here, `unwritable` a clause
    for each folder that the doctor itself cannot write to, `complaints` is srun's stderr.
    `gpus_hidden`: no step could get the job's GPUs."""

    asked: tuple[str, ...]
    answers: tuple[ProbeResult, ...]
    during: tuple[float, float]
    unseen: dict[str, tuple[str, ...]]
    unwritable: dict[str, str]
    complaints: str = ""
    gpus_hidden: bool = False
    shared: tuple[str, ...] = ()  # the folders in which they looked for marks


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
            output = run_on_nodes(nodes, inside, task, ASK_WITHIN, resources)
            hidden = bool(gpus) and not output.out
            if hidden:  # not every step can get the GPUs of a job
                output = run_on_nodes(nodes, inside, task, ASK_WITHIN)
            during, shared = (began, time.time()), question.folders
            place = {node: number for number, node in enumerate(nodes)}
            found = probe.read_results(output.out.splitlines())
            answers = tuple(sorted(found, key=lambda answer: place.get(answer.node, len(place))))
            unseen = {
                answer.node: tuple(str(Path(folder).parent) for folder in missing)
                for answer in answers
                if (missing := tuple(probe.unseen(question, answer)))
            }
    return Survey(nodes, answers, during, unseen, unwritable, output.complaints, hidden, shared)


@contextmanager
def _asking(wanted: NodeQuestions, nodes: int) -> Iterator[tuple[ProbeQuestion, dict[str, str]]]:
    """Yield the question, and why folders cannot be written, while each shared folder has a hidden
    mark."""
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
    """Yield the addresses of this machine, and a port that sends the time to each client."""
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
    with suppress(OSError):  # closed at the end
        while True:
            caller, _ = listener.accept()
            with caller, suppress(OSError):  # this client hung up; others may not
                caller.sendall(f"{time.time()}\n".encode())
