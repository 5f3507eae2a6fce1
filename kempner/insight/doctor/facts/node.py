"""What a node says of itself when the doctor asks: questions and answers, and how they travel.

`python -m kempner.insight.doctor.facts.node_probe QUESTION` prints an answer.

Which software a node has, and whether torch can be imported there, in a process of its own.

A short write test: how fast one process of a node writes to a folder, bounded in every way.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from kempner.cluster.network.interfaces import Interface
from kempner.cluster.slurm.node_step import in_lines, whole_answers
from kempner.insight.doctor.facts.gpus import GpuSurvey

IMPORT_WITHIN = 180.0
"""Seconds that the import of torch may take: from a busy network file system, minutes."""

_DRY_RUN = """
import importlib, json, sys
import kempner, torch
told = {
    "kempner": kempner.__version__,
    "torch": torch.__version__,
    "cuda": torch.version.cuda or torch.version.hip or "",
    "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}
for name in sys.argv[1:]:
    module, _, function = name.partition(":")
    found = importlib.import_module(module)
    for part in function.split(".") if function else ():
        found = getattr(found, part)
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Software:
    """Versions, and what torch sees: `cuda` is what it was built with (CUDA or ROCm), empty for
    CPUs alone; `devices` is how many GPUs it can use. `trouble` says why an import failed."""

    python: str
    kempner: str = ""
    torch: str = ""
    cuda: str = ""
    devices: int = 0
    trouble: str = ""


def look_at_software(imports: Sequence[str] = ()) -> Software:
    """Import torch and `imports` (`module` or `module:function`) in a process of its own."""
    python = platform.python_version()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DRY_RUN, *imports],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_WITHIN,
        )
    except subprocess.TimeoutExpired:
        trouble = f"its import takes longer than {IMPORT_WITHIN:g} s"
        return Software(python, trouble=trouble)
    except OSError as error:
        return Software(python, trouble=str(error))
    if done.returncode:
        last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
        trouble = last[0] if last else f"the process ended with {done.returncode}"
        return Software(python, trouble=trouble)
    told = json.loads(done.stdout.splitlines()[-1])
    return Software(python, **told)


LARGEST = 128 * 2**20
"""Bytes that a node writes at most."""

TOGETHER = 16 * 2**30
"""Bytes that all nodes write at most."""

SHARE = 0.05
"""Of the free space, the most that all of them take."""

LONGEST = 2.0
"""Seconds after which no further piece is written."""

_PIECE, _LEAST = 4 * 2**20, 4096
_SYNC_EVERY = 4
"""Pieces between two fsyncs: how long the last of them takes is bounded, too."""


@dataclass(frozen=True)
class WriteRate:
    """`written` bytes in `seconds`, with fsync; `trouble` says why it could not be written."""

    written: int
    seconds: float
    trouble: str = ""

    @property
    def rate(self) -> float | None:
        """Bytes a second; None where too little was written to tell."""
        return self.written / self.seconds if self.written and self.seconds > 0 else None


def write_test(folder: Path, name: str, writers: int = 1) -> WriteRate:
    """Write to a file in `folder` that has lost its name before it has any content.

    So nothing is left behind, however this process ends. `writers` is how many nodes do so at once.
    """
    written, began = 0, time.monotonic()
    try:
        together = min(TOGETHER, int(SHARE * shutil.disk_usage(folder).free))
        largest = max(_LEAST, min(LARGEST, together // writers))
        # What cannot be compressed is written as it is.
        content = os.urandom(min(_PIECE, largest))
        path = folder / name
        with open(path, "xb", buffering=0) as file:
            path.unlink()
            began = time.monotonic()
            pieces = 0
            while written < largest and time.monotonic() - began < LONGEST:
                written += file.write(content)
                pieces += 1
                if pieces % _SYNC_EVERY == 0:
                    os.fsync(file.fileno())
            os.fsync(file.fileno())
    except OSError as error:
        return WriteRate(written, time.monotonic() - began, error.strerror or str(error))
    return WriteRate(written, time.monotonic() - began)


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
