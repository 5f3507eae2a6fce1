"""Structured logs: JSON lines per process, and plain sentences on the terminal.

Before `open_log` names a file, events reach stderr only. A warning or worse is always printed, so
that a user sees it on the terminal or in Slurm's output without knowing where the file is. Logging
never raises, and never blocks for longer than a moment.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import structlog

from kempner.run.output.background_files import JsonLines, open_lines, unwritten_lines
from kempner.run.output.console import at_the_end, lost_lines, say

_LEVELS = logging.getLevelNamesMapping()


class _Sink:
    """Writes each event as JSON to the file, if one is open, and as a sentence to stderr."""

    def __init__(self) -> None:
        self.file: JsonLines | None = None
        self.context: dict[str, object] = {}
        self.console_level = logging.WARNING

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, object]
    ) -> Mapping[str, object]:
        if self.file is not None:
            self.file.append(json.dumps({**event, **self.context}, default=str))
        if _LEVELS[method.upper()] >= self.console_level:
            say(f"kempner: {sentence(event)}", sys.stderr)
        raise structlog.DropEvent


_sink = _Sink()


def sentence(event: Mapping[str, object]) -> str:
    """A logged event as a person reads it, with its exception below."""
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
    _sink.file = open_lines(path, warn)
    _sink.context = context
    at_the_end(_tell_what_was_not_shown)


def logger() -> structlog.typing.FilteringBoundLogger:
    """The process's logger. A program that has set up structlog for itself gets its own."""
    if not structlog.is_configured():
        configure()
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return log


def warn(sentence: str, facts: Mapping[str, object]) -> None:
    """Log a warning; what files of lines tell of their troubles with."""
    logger().warning(sentence, **facts)


def _tell_what_was_not_shown() -> None:
    for file, kept in unwritten_lines().items():
        say(f"kempner: {kept} lines could not be written to {file}", sys.stderr)
    if (lines := lost_lines()) and _sink.file is not None:
        logger().warning("output could not be shown", lines=lines)
