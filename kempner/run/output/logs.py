"""Structured logs: JSON lines per process, and plain sentences on the terminal.

Before `open_log` names a file, events go to stderr only. Warnings and errors are always printed, so
that a user sees them on the terminal or in Slurm's output. Logging never raises, and never blocks
for longer than a moment.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

import structlog
from structlog.typing import FilteringBoundLogger

from kempner.run.output.console import at_the_end, lost_lines, say
from kempner.run.output.writers import JsonLines, open_lines, unwritten_lines

_LEVELS = logging.getLevelNamesMapping()


class _Sink:
    def __init__(self) -> None:
        self.file: JsonLines | None = None
        self.context: dict[str, object] = {}
        self.console_level = logging.WARNING

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, object]
    ) -> Mapping[str, object]:
        if self.file is not None:
            self.file.append({**event, **self.context})
        if _LEVELS[method.upper()] >= self.console_level:
            say(f"kempner: {sentence(event)}", sys.stderr)
        raise structlog.DropEvent


_sink = _Sink()
_logger: FilteringBoundLogger = structlog.wrap_logger(
    None,
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        lambda *event: _sink(*event),  # another one in tests
    ],
    wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
    cache_logger_on_first_use=True,
)


def logger() -> FilteringBoundLogger:
    """The process's logger; a program's own settings of structlog are neither used nor changed."""
    return _logger


def sentence(event: Mapping[str, object]) -> str:
    """A logged event as a person reads it, with its exception below."""
    hidden = {"event", "level", "timestamp", "exception", "attempt", "pid"}
    details = ", ".join(f"{key} {value}" for key, value in event.items() if key not in hidden)
    text = f"{event['event']}" + (f" ({details})" if details else "")
    return f"{text}\n{event['exception']}" if "exception" in event else text


def open_log(path: Path, **context: object) -> None:
    """Write every later event of this process to `path`, too, with `context` on each line."""
    _sink.file = open_lines(path, warn)
    _sink.context = context
    at_the_end(_tell_what_was_not_shown)


def warn(sentence: str, facts: Mapping[str, object]) -> None:
    """Log a warning; the callback by which files of lines report that they cannot be written."""
    logger().warning(sentence, **facts)


def _tell_what_was_not_shown() -> None:
    for file, kept in unwritten_lines().items():
        say(f"kempner: {kept} lines could not be written to {file}", sys.stderr)
    if (lines := lost_lines()) and _sink.file is not None:
        logger().warning("output could not be shown", lines=lines)


HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:token|secret|passwd|password|passphrase|credentials?|apikey|"
    r"(?:api|access|auth|private|secret)[_-]?key)$",
    re.IGNORECASE,
)
"""The last part of a name: `hub_token`, `HF_TOKEN`, `--api-key`, but not `tokenizer`, `max_tokens`.
"""

_SECRET_VALUE = re.compile(
    r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA)[A-Za-z0-9_-]{12,}"
)
"""What tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack and AWS look like."""

_TOKEN_STARTS = (b"hf_", b"ghp_", b"gho_", b"github_pat_", b"glpat-", b"sk-", b"xox", b"AKIA")
"""Prefixes of tokens: a text without any of them has no token."""

_IN_ADDRESS = re.compile(r"(?<=://)([^/@:\s]*):([^/@\s]+)(?=@)")
"""`user:password` in a URL."""

_SHORTEST = 8
"""A variable's value of fewer characters is taken for a word, not for a secret."""

_ASSIGNED = re.compile(r"(?P<name>-{0,2}[A-Za-z_][\w.-]*)=(?P<value>.+)", re.DOTALL)


def redacted(words: Sequence[str]) -> list[str]:
    """`words` with `***` for each secret, known by name (`--x.token=VALUE`, `API_KEY=VALUE`,
    `--token VALUE`) or by form."""
    return list(_redacted(words))


def _redacted(words: Sequence[str]) -> Iterator[str]:
    follows = False
    for word in words:
        if follows and not word.startswith("-"):
            yield HIDDEN
            follows = False
            continue
        assigned = _ASSIGNED.fullmatch(word)
        follows = word.startswith("-") and is_secret(word)
        if assigned is not None and is_secret(assigned["name"]):
            yield f"{assigned['name']}={HIDDEN}"
        else:
            yield _SECRET_VALUE.sub(HIDDEN, _IN_ADDRESS.sub(rf"\1:{HIDDEN}", word))


def masking(environ: Mapping[str, str]) -> Callable[[bytes], bytes]:
    """A function that replaces secrets in a program's output by `***`: what has the form of one,
    and the values of variables in `environ` whose names say so."""
    known = {v.encode() for name, v in environ.items() if is_secret(name) and len(v) >= _SHORTEST}
    longest_first, hidden = sorted(known, key=len, reverse=True), HIDDEN.encode()
    token = re.compile(_SECRET_VALUE.pattern.encode())
    address = re.compile(_IN_ADDRESS.pattern.encode())

    def masked(lines: bytes) -> bytes:
        for value in longest_first:
            lines = lines.replace(value, hidden)
        if any(start in lines for start in _TOKEN_STARTS):  # a tenth of what the expression costs
            lines = token.sub(hidden, lines)
        return address.sub(rb"\1:" + hidden, lines) if b"://" in lines else lines

    return masked


def is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None
