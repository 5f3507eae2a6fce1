"""Attempts and fencing: at most one launch of the ranks may commit; and which logs to delete.

An attempt is numbered by the exclusive creation of its folder, and live while `attempts/CURRENT`
holds its number and nonce. Starting a new attempt thereby fences off all earlier ones, even while
their processes live, without a lock, a lease or a clock.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kempner.run.output.logs import logger
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import CheckpointWriteError, DataError
from kempner.run.process.retry import read_filled, storage_waits
from kempner.run.process.threads import start_thread
from kempner.run.record import gave_up
from kempner.run.record.run_dir import RunDirectory, cannot_keep

CURRENT = "CURRENT"


class SupersededError(CheckpointWriteError):
    """A newer attempt owns the run; this one must not commit any more."""


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
        """Raise `SupersededError` if `attempts/CURRENT` names another attempt, and `OSError` if it
        cannot be read or is missing: then its storage is away."""
        path, current = self.attempts / CURRENT, read_current(self.attempts)
        if current is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if current != self.attempt:
            raise SupersededError(
                f"attempt {self.attempt.number} must not commit any more: {path} names attempt "
                f"{current.number}"
            )


def read_current(attempts: Path) -> Attempt | None:
    """The live attempt, or None before the first. Raises `OSError` if the file cannot be read now,
    `DataError` if it is damaged."""
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
    Raises `UsageError` if the run's directory cannot be written, and as `StorageWaits.retry` if
    that may be temporary."""
    try:
        return storage_waits().retry(partial(_begin, run), worked, path=run.attempts)
    except OSError as error:
        raise cannot_keep(run, error) from error


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
    """Delete the folders of old attempts from a thread, since thousands of files take seconds. The
    last `keep`, and the one that `GAVE_UP` names, stay."""
    start_thread("prune", partial(_prune, run, keep))


def outdated(numbers: Iterable[int], keep: int, given_up: int | None) -> list[int]:
    """The attempts whose logs may go: all but the last `keep` and the one in `GAVE_UP`."""
    return [number for number in sorted(numbers)[:-keep] if number != given_up]


def _prune(run: RunDirectory, keep: int) -> None:
    """Delete the oldest first. What cannot be deleted now is left to the next start."""
    try:
        mark = gave_up.read(run)
        for number in outdated(attempt_numbers(run), keep, None if mark is None else mark.attempt):
            shutil.rmtree(run.attempt(number))
    except OSError as error:
        logger().info("cannot delete old logs", file=error.filename, error=error.strerror)


def attempt_numbers(run: RunDirectory) -> list[int]:
    return [int(path.name) for path in run.attempts.iterdir() if path.name.isdecimal()]


@dataclass(frozen=True)
class AttemptLogs:
    """The folder of an attempt: `bytes` on the disk, last `written` to in Unix time, seconds."""

    number: int
    bytes: int
    written: float


@dataclass(frozen=True)
class LogFate:
    """Whether the logs of an attempt are deleted (`goes`), or `why` they stay."""

    logs: AttemptLogs
    goes: bool
    why: str = ""


def decide_fates(
    found: Sequence[AttemptLogs],
    needed: Mapping[int, str],
    now: float,
    keep_last: int = 1,
    older_than: float = 0.0,
) -> list[LogFate]:
    """Decide for each attempt, by number, whether its logs go. They stay if the attempt is one of
    the last `keep_last`, was written to within `older_than` seconds, or is in `needed`, with the
    reason. The highest number always stays: the next attempt is numbered by it."""
    last = sorted(logs.number for logs in found)[-max(1, keep_last) :]
    fates = []
    for logs in sorted(found, key=lambda each: each.number):
        why = needed.get(logs.number, "one of the last" if logs.number in last else "")
        if not why and now - logs.written < older_than:
            why = "not that old"
        fates.append(LogFate(logs, goes=not why, why=why))
    return fates


def needed_attempts(run: RunDirectory) -> dict[int, str]:
    """The attempts that must stay, each with the reason. Raises `OSError`."""
    current, mark = read_current(run.attempts), gave_up.read(run)
    needed = {} if mark is None else {mark.attempt: "GAVE_UP names it"}
    live = {} if current is None else {current.number: "the live attempt, or the last one"}
    return needed | live


def survey_attempts(run: RunDirectory) -> list[AttemptLogs]:
    """All attempts that have a folder; costs a stat(2) per file. Raises `OSError`."""
    if not run.attempts.is_dir():
        return []
    return [_measure(run.attempt(number), number) for number in attempt_numbers(run)]


def _measure(folder: Path, number: int) -> AttemptLogs:
    stats = list(_stats(folder))
    return AttemptLogs(
        number,
        sum(stat.st_blocks * 512 for stat in stats),
        max((stat.st_mtime for stat in stats), default=0.0),
    )


def _stats(folder: Path) -> Iterator[os.stat_result]:
    for path in (folder, *folder.rglob("*")):
        try:
            yield path.lstat()
        except FileNotFoundError:
            continue  # another process prunes, too
