"""The invitation: a file in a run's directory that tells agents of other jobs how to reach its
supervisor. And what `kempner join` tells its agent, in the environment and through standard input.

The invitation holds the agents' secret, so only its owner can read it (mode 0600). It names a
command, so only an invitation of the same user is accepted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kempner.run.link.messages import PROTOCOL, Joins
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import fsync_directory
from kempner.run.process.exit_codes import UsageError

PRIVATE = 0o600


@dataclass(frozen=True)
class Invitation:
    """Where the supervisor listens for agents, their secret (`token`), the ranks' program (as from
    `node_agent.program_text`) and their working directory."""

    addresses: tuple[str, ...]
    port: int
    token: str
    program: str
    folder: str
    version: int = PROTOCOL

    def write(self, path: Path) -> None:
        """Replace the file at `path`. Raises `OSError`."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
        with open(descriptor, "w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)

    def withdraw(self, path: Path) -> None:
        """Remove the file, unless another supervisor has replaced it. Raises `OSError`."""
        if self.read(path) == self:
            with suppress(FileNotFoundError):
                path.unlink()

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The invitation at `path`; None if there is none.

        Raises `OSError`, or `UsageError` if it is of another user or kempner version."""
        try:
            with path.open() as file:
                owner, text = os.fstat(file.fileno()).st_uid, file.read()
        except FileNotFoundError:
            return None
        if owner != os.geteuid():
            raise UsageError(f"{path} is not yours: only who started a run can join it")
        fields = json.loads(text)
        if fields.get("version") != PROTOCOL:
            raise UsageError(f"{path} is of another version of kempner: join with that one")
        return cls(**{**fields, "addresses": tuple(fields["addresses"])})


TERMS = "KEMPNER_AGENT_JOINS"
"""Environment variable of an agent that joins the run of another job."""


@dataclass(frozen=True)
class JoinTerms:
    """An agent offers room for `ranks` ranks of the run in the directory `run`, `until` a time
    (`time.monotonic`, seconds; None: without end). `job` is its Slurm job id, empty outside of a
    job."""

    job: str
    ranks: int
    until: float | None
    run: str

    @property
    def now(self) -> Joins:
        """The terms for the supervisor, with the seconds left: its clock is another."""
        left = None if self.until is None else max(0.0, self.until - time.monotonic())
        return Joins(self.job, self.ranks, left)

    def environment(self) -> dict[str, str]:
        return {TERMS: json.dumps(asdict(self))}

    @classmethod
    def taken_from(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Take the terms out of the environment; None for an agent of the supervisor's own job."""
        text = environ.pop(TERMS, None)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True)
class Departure:
    """The agent has to leave within `seconds`."""

    seconds: float
    reason: str

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def hear_departures(heard: Callable[[Departure | None], None]) -> None:
    """Pass on each `Departure` from standard input; None when `kempner join` has ended."""
    for line in sys.stdin.buffer:
        try:
            heard(Departure(**json.loads(line)))
        except (ValueError, TypeError) as error:
            logger().warning("not understood", line=line.decode(errors="replace"), why=str(error))
    heard(None)
