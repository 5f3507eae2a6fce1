"""What a node says of itself when the doctor asks: questions and answers, and how they travel.

`python -m kempner.insight.doctor.facts.node_probe QUESTION` prints an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from kempner.cluster.network.interfaces import Interface
from kempner.cluster.slurm.node_step import in_lines, whole_answers
from kempner.insight.doctor.facts.gpus import GpuSurvey
from kempner.insight.doctor.facts.software import Software
from kempner.insight.doctor.facts.write_test import WriteRate


@dataclass(frozen=True)
class FolderQuestion:
    """Folders to look at. In each of `shared` the doctor has written `nonce`; of `copies`, files
    whose content must be the same everywhere, nodes may have their own; `caches` are folders that
    are to be readable, or to be made."""

    nonce: str
    shared: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    written_to: str = ""
    """The one of `shared` to which a short write test goes; empty for none."""
    writers: int = 1
    """Nodes that write at once."""


@dataclass(frozen=True)
class NetworkQuestion:
    """`interface` as configured; `on_one_node` if the ranks need no network; `first` is the node of
    rank 0; `meet_at` are addresses with prefix length on which the doctor listens, at `port`."""

    interface: str | None = None
    on_one_node: bool = True
    first: str = ""
    meet_at: tuple[str, ...] = ()
    port: int = 0


@dataclass(frozen=True)
class NodeQuestion:
    """All that a node is asked; `imports` are modules to import besides torch."""

    folders: FolderQuestion
    network: NetworkQuestion = NetworkQuestion()
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What a process may have here: `open_files` (hard limit) and `memlock` (soft limit, bytes) are
    None without a limit. Sizes are in bytes; `temporary` is by folder of temporary files."""

    open_files: int | None
    memlock: int | None
    shm_total: int
    shm_free: int
    memory_total: int
    memory_free: int
    temporary: tuple[str, int]


@dataclass(frozen=True)
class NetworkFacts:
    """`interface` is what the ranks would bind to, None if that is left to Gloo or impossible.

    `trouble` says why it cannot be used, `warning` what is odd about it, `unreachable` why the
    doctor's own address on that network does not answer. `clock_ahead` is by how many seconds this
    node's clock is ahead of the doctor's, None where that could not be asked.
    """

    interface: Interface | None
    trouble: str = ""
    warning: str = ""
    unreachable: str = ""
    infiniband: bool = False
    clock_ahead: float | None = None


@dataclass(frozen=True)
class FolderFacts:
    """What a node sees of the folders: `troubles` are clauses by folder, `digests` the content of
    the copies, empty for one that cannot be read."""

    troubles: dict[str, str]
    digests: dict[str, str]
    caches: dict[str, str]
    write: WriteRate | None = None


@dataclass(frozen=True)
class NodeAnswer:
    """A node's answer; `time` is in seconds since the epoch by its own clock."""

    node: str
    time: float
    limits: Limits
    network: NetworkFacts
    folders: FolderFacts
    gpus: GpuSurvey
    software: Software


_QUESTION = TypeAdapter(NodeQuestion)
_ANSWER = TypeAdapter(NodeAnswer)


def question_text(question: NodeQuestion) -> str:
    """A question as an argument for the probe's command."""
    return _QUESTION.dump_json(question).decode()


def read_question(text: str) -> NodeQuestion:
    """The inverse. Raises `ValueError`."""
    return _QUESTION.validate_json(text)


def answer_text(answer: NodeAnswer) -> str:
    """An answer as lines of a step's task."""
    return in_lines(answer.node, _ANSWER.dump_json(answer))


def read_answers(text: str) -> list[NodeAnswer]:
    """The answers in what the nodes print, in any order of their lines."""
    answers = (_read(answer) for answer in whole_answers(text.splitlines()))
    return [answer for answer in answers if answer is not None]


def _read(answer: bytes) -> NodeAnswer | None:
    try:
        return _ANSWER.validate_json(answer)
    except ValueError:
        return None
