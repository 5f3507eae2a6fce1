"""The messages between a fork server and its client: one message, one packet.

The socket is a pair of type SOCK_SEQPACKET (unix(7)), so that no message comes in parts. With an
order travel the descriptors to print to, if there are any.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

from kempner.run.process.worker_process import SAFE_MODULE

LARGEST = 1 << 20
"""Bytes of a message; the kernel may allow less, and refuses what is larger."""


@dataclass(frozen=True)
class ForkOrder:
    """To the server: fork, and be `python ARGUMENTS...` in this environment.

    `ours` is a program that blocks the stop signals until it traps them; any other one gets
    SIGTERM when the server's parent ends. It may use these `cpus`, all of the server's if none are
    given.
    """

    number: int
    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    ours: bool
    cpus: tuple[int, ...] = ()
    kind: ClassVar[str] = "order"


@dataclass(frozen=True)
class ServerReady:
    """From the server: everything is imported."""

    kind: ClassVar[str] = "ready"


@dataclass(frozen=True)
class ProcessForked:
    """From the server: an order was carried out by this process.

    An `orphan` has become the child of the server's own parent, which sees for itself how it ends.
    """

    number: int
    pid: int
    orphan: bool = False
    kind: ClassVar[str] = "forked"


@dataclass(frozen=True)
class ForkRefused:
    """From the server: an order was not carried out, since a fork would not be safe now."""

    number: int
    reason: str
    kind: ClassVar[str] = "refused"


@dataclass(frozen=True)
class ProcessEnded:
    """From the server: a process has ended, with an exit code or minus the signal."""

    pid: int
    status: int
    kind: ClassVar[str] = "ended"


Message: TypeAlias = ForkOrder | ServerReady | ProcessForked | ForkRefused | ProcessEnded

_KINDS = {
    kind.kind: kind for kind in (ForkOrder, ServerReady, ProcessForked, ForkRefused, ProcessEnded)
}


def encode(message: Message) -> bytes:
    """The packet of a message. A name or value that is no text keeps its bytes."""
    return json.dumps({"kind": message.kind, **asdict(message)}).encode()


def decode(packet: bytes) -> Message:
    """The message in a packet of the other side, which is trusted."""
    fields = json.loads(packet)
    for name in {"arguments", "cpus"} & fields.keys():
        fields[name] = tuple(fields[name])
    return _KINDS[fields.pop("kind")](**fields)


def arguments_of_python(command: Sequence[str]) -> tuple[str, ...] | None:
    """What follows `python` in a command that a fork can carry out; None if it cannot.

    That is `python -m MODULE ...` or `python FILE.py ...`, by this Python, without other options:
    they would have to be known when it starts.
    """
    if len(command) < 2 or not _is_this_python(command[0]):
        return None
    safely = tuple(command[1:3]) == SAFE_MODULE  # as the server itself was started
    words = tuple(command[2 if safely else 1 :])
    if words[0] == "-m" and len(words) > 1:
        return words
    return words if words[0].endswith(".py") else None


def _is_this_python(word: str) -> bool:
    if word in ("python", "python3"):
        bin_folder = Path(sys.executable).parent
        first = next((f for f in os.get_exec_path() if (Path(f) / word).exists()), None)
        return first is not None and Path(first).resolve() == bin_folder.resolve()
    return Path(word) == Path(sys.executable)
