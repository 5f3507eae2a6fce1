"""The logs of a run's attempts: how large and how old they are, and which may go.

What is asked for by a person, with `kempner prune`. A run prunes by number alone, as it starts an
attempt: `prune_attempts`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.run.record import gave_up
from kempner.run.record.attempts import attempt_numbers, outdated, read_current
from kempner.run.record.run_dir import RunDirectory


@dataclass(frozen=True)
class AttemptLogs:
    """The folder of an attempt: `bytes` on the disk, last `written` to in Unix time, seconds."""

    number: int
    bytes: int
    written: float


@dataclass(frozen=True)
class Rule:
    """What may go: not the last `keep_last` attempts, nor what is younger than `older_than` s."""

    keep_last: int = 1
    older_than: float = 0.0


@dataclass(frozen=True)
class NeededAttempts:
    """Attempts that must stay: the `live` one, and that which GAVE_UP names."""

    live: int | None = None
    given_up: int | None = None


@dataclass(frozen=True)
class LogFate:
    """What becomes of the logs of an attempt; `why` they stay."""

    logs: AttemptLogs
    goes: bool
    why: str = ""


def decide_fates(
    found: Sequence[AttemptLogs], rule: Rule, needed: NeededAttempts, now: float
) -> list[LogFate]:
    """What becomes of each attempt's logs, by number.

    The highest number always stays: the next attempt is numbered by it.
    """
    old = outdated([logs.number for logs in found], max(1, rule.keep_last), needed.given_up)
    fates = []
    for logs in sorted(found, key=lambda each: each.number):
        why = ""
        if logs.number == needed.live:
            why = "the live attempt, or the last one"
        elif logs.number == needed.given_up:
            why = "GAVE_UP names it"
        elif logs.number not in old:
            why = "one of the last"
        elif now - logs.written < rule.older_than:
            why = "not that old"
        fates.append(LogFate(logs, goes=not why, why=why))
    return fates


def needed_attempts(run: RunDirectory) -> NeededAttempts:
    """Those that must stay. Raises `OSError` if that cannot be read now."""
    current, mark = read_current(run.attempts), gave_up.read(run)
    return NeededAttempts(
        live=None if current is None else current.number,
        given_up=None if mark is None else mark.attempt,
    )


def survey_attempts(run: RunDirectory) -> list[AttemptLogs]:
    """Every attempt whose folder is there; costs a stat(2) per file. Raises `OSError`."""
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
