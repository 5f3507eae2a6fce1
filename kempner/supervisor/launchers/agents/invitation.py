"""The invitation in a run's directory: where agents of other jobs find its supervisor.

It holds the agents' secret, so only its owner can read it (mode 0600), and only an invitation of
one's own is followed: it names a command.

What `kempner join` tells its agent: in the environment, and later by the agent's input.
"""

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
    """Where the supervisor listens to agents and their secret; the program of its ranks, as agents
    read it, and the folder in which they work."""

    addresses: tuple[str, ...]
    port: int
    token: str
    program: str
    folder: str
    version: int = PROTOCOL

    def write(self, path: Path) -> None:
        """Replace what is there. Raises `OSError`."""
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
        """Remove it, unless another supervisor has replaced it. Raises `OSError`."""
        if self.read(path) == self:
            with suppress(FileNotFoundError):
                path.unlink()

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The invitation at `path`; None if there is none.

        Raises `OSError`, and `UsageError` if it is another user's, or of another kempner version.
        """
        try:
            with path.open() as file:
                owner, text = os.fstat(file.fileno()).st_uid, file.read()
        except FileNotFoundError:
            return None
        if owner != os.geteuid():
            raise UsageError(f"{path} is not yours: only who started a run can join it")
        told = json.loads(text)
        if told.get("version") != PROTOCOL:
            raise UsageError(f"{path} is of another version of kempner: join with that one")
        return cls(**{**told, "addresses": tuple(told["addresses"])})


TERMS = "KEMPNER_AGENT_JOINS"
"""Variable of an agent that joins the run of another job."""


@dataclass(frozen=True)
class JoinTerms:
    """Room for a number of `ranks` of the run in a directory, until a time (`time.monotonic`,
    seconds; None: without end). `job` is the Slurm id, empty outside of a job."""

    job: str
    ranks: int
    until: float | None
    run: str

    @property
    def now(self) -> Joins:
        """As the supervisor is told, which has a clock of its own."""
        left = None if self.until is None else max(0.0, self.until - time.monotonic())
        return Joins(self.job, self.ranks, left)

    def environment(self) -> dict[str, str]:
        """As a variable."""
        return {TERMS: json.dumps(asdict(self))}

    @classmethod
    def taken_from(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Take it out of the environment again; None for an agent of the supervisor's own job."""
        text = environ.pop(TERMS, None)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True)
class Departure:
    """The agent has to leave within `seconds`."""

    seconds: float
    reason: str

    def line(self) -> bytes:
        """As the agent reads it."""
        return json.dumps(asdict(self)).encode() + b"\n"


def hear_departures(heard: Callable[[Departure | None], None]) -> None:
    """Pass on what comes by this process's input; None once who started it has ended."""
    for line in sys.stdin.buffer:
        try:
            heard(Departure(**json.loads(line)))
        except (ValueError, TypeError) as error:
            logger().warning("not understood", line=line.decode(errors="replace"), why=str(error))
    heard(None)
