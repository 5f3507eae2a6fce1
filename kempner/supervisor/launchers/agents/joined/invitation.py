"""The invitation in a run's directory: where agents of other jobs find its supervisor.

It holds the agents' secret, so only its owner can read it (mode 0600), and only an invitation of
one's own is followed: it names a command.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kempner.run.control.protocol import PROTOCOL
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
