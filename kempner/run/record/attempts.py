"""Attempts and fencing: at most one launch of the ranks may commit.

An attempt is numbered by the exclusive creation of its folder, and live while `attempts/CURRENT`
holds its number and nonce. Whoever starts a new attempt thereby fences off all earlier ones,
whether or not their processes are gone: no lock, no lease, and no clock is consulted.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import CheckpointWriteError, UsageError
from kempner.run.record.run_dir import RunDirectory

CURRENT = "CURRENT"


class SupersededError(CheckpointWriteError):
    """A newer attempt owns the run; this one must not commit anything any more."""


@dataclass(frozen=True)
class Attempt:
    """One launch of all ranks: a number that is never used twice, and a nonce."""

    number: int
    nonce: str


@dataclass(frozen=True)
class Fence:
    """Tells whether an attempt is still the live one."""

    attempts: Path
    attempt: Attempt

    def check(self) -> None:
        """Raise `SupersededError` unless `attempts/CURRENT` still names this attempt."""
        current = read_current(self.attempts)
        if current != self.attempt:
            newer = f"attempt {current.number}" if current else "nobody"
            raise SupersededError(
                f"attempt {self.attempt.number} must not commit any more: "
                f"{self.attempts / CURRENT} names {newer}"
            )


def read_current(attempts: Path) -> Attempt | None:
    """The live attempt, or None before the first."""
    try:
        fields = json.loads((attempts / CURRENT).read_bytes())
    except FileNotFoundError:
        return None
    return Attempt(number=fields["attempt"], nonce=fields["nonce"])


def begin_attempt(run: RunDirectory) -> Attempt:
    """Number a new attempt and make it the live one.

    Raises `UsageError` if the run's directory cannot be written.
    """
    try:
        return _begin(run)
    except OSError as error:
        raise UsageError(
            f"the run's directory {run.path} cannot be written ({error.strerror}); "
            "set run.dir to a writable folder"
        ) from error


def _begin(run: RunDirectory) -> Attempt:
    run.attempts.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(p.name) for p in run.attempts.iterdir() if p.name.isdecimal()), default=0)
    while True:
        try:
            run.attempt(number).mkdir()
            break
        except FileExistsError:
            number += 1
    attempt = Attempt(number=number, nonce=secrets.token_hex(4))
    content = json.dumps({"attempt": attempt.number, "nonce": attempt.nonce}) + "\n"
    replace_durable(run.attempts / CURRENT, content.encode(), unique=attempt.nonce)
    return attempt
