"""Attempts and fencing: at most one launch of the ranks may commit.

An attempt is numbered by the exclusive creation of its folder, and live while `attempts/CURRENT`
holds its number and nonce. Starting a new attempt thereby fences off all earlier ones, whether or
not their processes are gone: no lock, no lease, and no clock is consulted.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kempner.run.output.logs import logger
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import CheckpointWriteError, DataError, UsageError
from kempner.run.process.retry import read_filled, storage_waits
from kempner.run.record import gave_up
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
        """Raise `SupersededError` if `attempts/CURRENT` names another attempt than this.

        Raises `OSError` where it cannot be read now, or is not there: it was, so its storage is
        away.
        """
        path, current = self.attempts / CURRENT, read_current(self.attempts)
        if current is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if current != self.attempt:
            raise SupersededError(
                f"attempt {self.attempt.number} must not commit any more: {path} names attempt "
                f"{current.number}"
            )


def read_current(attempts: Path) -> Attempt | None:
    """The live attempt, or None before the first.

    Raises `OSError` if that cannot be read now, `DataError` if the file is damaged.
    """
    path = attempts / CURRENT
    try:
        fields = json.loads(read_filled(path))
        return Attempt(number=int(fields["attempt"]), nonce=str(fields["nonce"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged; when nothing of this run runs, delete it") from error


def begin_attempt(run: RunDirectory, worked: bool = False) -> Attempt:
    """Number a new attempt and make it the live one; `worked` is whether the run had one before.

    Raises `UsageError` if the run's directory cannot be written, and as `StorageWaits.retry` where
    that is so for now.
    """
    try:
        return storage_waits().retry(partial(_begin, run), worked, path=run.attempts)
    except OSError as error:
        raise UsageError(
            f"the run's directory {run.path} cannot be written ({error.strerror}); "
            "set run.dir to a writable folder"
        ) from error


def _begin(run: RunDirectory) -> Attempt:
    run.attempts.mkdir(parents=True, exist_ok=True)
    number = 1 + max(attempt_numbers(run), default=0)
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


def prune_attempts(run: RunDirectory, keep: int) -> None:
    """Delete the folders of all attempts but the last `keep`, and the one that `GAVE_UP` names.

    From a thread: thousands of files take seconds, for which the caller need not wait.
    """
    threading.Thread(target=_prune, args=(run, keep), name="prune", daemon=True).start()


def outdated(numbers: Iterable[int], keep: int, given_up: int | None) -> list[int]:
    """The attempts whose logs may be deleted: not the last `keep`, nor the one in `GAVE_UP`."""
    return [number for number in sorted(numbers)[:-keep] if number != given_up]


def _prune(run: RunDirectory, keep: int) -> None:
    """Oldest first. What cannot be deleted now is tried again at the next start."""
    try:
        mark = gave_up.read(run)
        for number in outdated(attempt_numbers(run), keep, None if mark is None else mark.attempt):
            shutil.rmtree(run.attempt(number))
    except OSError as error:
        logger().info("cannot delete old logs", file=error.filename, error=error.strerror)


def attempt_numbers(run: RunDirectory) -> list[int]:
    """Of the attempts whose folders are there, in no order. Raises `OSError`."""
    return [int(path.name) for path in run.attempts.iterdir() if path.name.isdecimal()]
