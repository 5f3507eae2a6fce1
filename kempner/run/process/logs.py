"""Structured logs: JSON lines per process, and plain sentences on the terminal.

Before `open_log` names a file, events reach stderr only. A warning or worse is always printed, so
that whoever looks at the terminal or at Slurm's output need not know where the file is.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TextIO

import structlog

_LEVELS = logging.getLevelNamesMapping()


class _Sink:
    """Writes each event as JSON to the file, if one is open, and as a sentence to stderr."""

    def __init__(self) -> None:
        self.file: TextIO | None = None
        self.context: dict[str, object] = {}
        self.console_level = logging.WARNING

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, object]
    ) -> Mapping[str, object]:
        kept = self._keep({**event, **self.context})
        if not kept or _LEVELS[method.upper()] >= self.console_level:
            print(f"kempner: {_sentence(event)}", file=sys.stderr, flush=True)
        raise structlog.DropEvent

    def _keep(self, event: Mapping[str, object]) -> bool:
        """Write to the file, if one is open; False if it could not be, for want of space, say."""
        if self.file is None:
            return True
        try:
            self.file.write(json.dumps(event, default=str) + "\n")
            self.file.flush()
        except OSError:
            return False
        return True


_sink = _Sink()


def _sentence(event: Mapping[str, object]) -> str:
    hidden = {"event", "level", "timestamp", "exception", "attempt", "pid"}
    details = ", ".join(f"{key} {value}" for key, value in event.items() if key not in hidden)
    text = f"{event['event']}" + (f" ({details})" if details else "")
    return f"{text}\n{event['exception']}" if "exception" in event else text


def configure() -> None:
    """Set structlog up for this process. Safe to call again."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _sink,
        ],
        cache_logger_on_first_use=True,
    )


def open_log(path: Path, **context: object) -> None:
    """Send every later event of this process to `path`, too, with `context` on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sink.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    _sink.context = context


def logger() -> structlog.typing.FilteringBoundLogger:
    """The process's logger; call `configure` first."""
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return log
