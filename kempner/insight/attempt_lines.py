"""The logs and the printed output of an attempt's processes, as readable lines."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path

from kempner.run.output.logs import sentence
from kempner.run.record.run_dir import RunDirectory

SUPERVISOR = "supervisor"  # the source of lines that no rank has written
_UNTIMED = "~"  # in place of a time, for what was printed: it sorts behind every time

_NAME = re.compile(r"(?:rank-(?P<rank>\d+)|supervisor)\.(?:jsonl|out)")


@dataclass(frozen=True)
class LogText:
    """A line of `source`, or several that belong together; `time` is in ISO 8601, which sorts as
    text, or `_UNTIMED`."""

    time: str
    source: str
    text: str

    def __str__(self) -> str:
        clock = ""
        if self.time != _UNTIMED:
            clock = f" {datetime.fromisoformat(self.time).astimezone():%H:%M:%S}"
        return "\n".join(f"[{self.source}]{clock} {line}" for line in self.text.splitlines())


class AttemptLines:
    """Follows the logs of an attempt: each `read` returns only new lines.

    `rank` is the rank to read; None: all ranks and the supervisor.
    """

    def __init__(self, run: RunDirectory, attempt: int, rank: int | None = None) -> None:
        self.folder, self._rank = run.attempt(attempt), rank
        self._read_up_to: dict[Path, int] = {}

    def read(self) -> Iterator[LogText]:
        """The new lines: logs by time, then printed output by rank. Raises `OSError`."""
        return heapq.merge(*map(self._new, self._files()), key=attrgetter("time"))

    def _files(self) -> list[Path]:
        try:
            there = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return []
        named = [(path, found) for path in there if (found := _NAME.fullmatch(path.name))]
        wanted = None if self._rank is None else f"{self._rank:05d}"
        return [path for path, found in named if wanted in (None, found["rank"])]

    def _new(self, path: Path) -> Iterator[LogText]:
        """The new complete lines of a file."""
        rank = path.name.removeprefix("rank-").partition(".")[0]
        source = f"rank {int(rank)}" if rank.isdecimal() else SUPERVISOR
        structured = path.suffix == ".jsonl"
        try:
            with path.open("rb") as file:
                file.seek(self._read_up_to.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._read_up_to[path] = self._read_up_to.get(path, 0) + len(line)
                    text = line.decode(errors="replace")
                    yield _logged(text, source) if structured else _printed(text, source)
        except FileNotFoundError:
            return  # pruned meanwhile


def _logged(line: str, source: str) -> LogText:
    try:
        event = json.loads(line)
        time, level = datetime.fromisoformat(event["timestamp"]), event["level"]
    except (ValueError, KeyError, TypeError):
        return _printed(line, source)
    event.pop("rank", None)
    loud = "" if level in ("debug", "info") else f"{level}: "
    return LogText(time.isoformat(), source, f"{loud}{sentence(event)}")


def _printed(line: str, source: str) -> LogText:
    return LogText(_UNTIMED, source, line.rstrip("\n"))


def shown(texts: Iterable[LogText]) -> Iterator[str]:
    """The lines in the form of `kempner logs`, without empty ones."""
    return (str(text) for text in texts if text.text.strip())
