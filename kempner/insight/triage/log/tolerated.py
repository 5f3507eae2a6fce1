"""Errors that a program speaks of and goes on: it tries again, skips, or takes something else."""

from __future__ import annotations

import re

_GOES_ON = re.compile(
    r"(?i)\b(?:re-?trying|re-?try(?: in| after|:|\()|re-?tries left|trying (?:again|to resume)"
    r"|will (?:be )?(?:re-?try|re-?tried|try again|skip|skipped|continue|reconnect)"
    r"|retry loop|back(?:ing)?[- ]?off|sleeping|skip(?:s|ping|ped)|ignor(?:es|ing|ed)"
    r"|fall(?:s|ing)?[- ]?back|continuing|carrying on|proceeding|anyway|accepting|tolerat\w+"
    r"|recovered|re(?:connect|open)(?:ing|ed)|non-?fatal|harmless|substitut(?:ed|ing)"
    r"|disabling|(?:is|metrics|logging) disabled)\b"
)
_COUNTED = re.compile(
    r"(?i)\b(?:attempt|try|retry|trial)\W{0,3}(?P<this>\d+)\s*(?:/|of|out of)\s*(?P<most>\d+)"
)
_GIVES_UP = re.compile(
    r"(?i)\b(?:giv(?:e|es|ing) up|gave up|no (?:more |further )?(?:retr|attempt|fallback)"
    r"|(?<!max )retries (?:exhausted|exceeded)|exhausted|(?:last|final) (?:attempt|retry|try)"
    r"|(?:not|cannot|can't|could not|unable to|never) (?:be )?"
    r"(?:re-?tr[yi]|recover|continu|skip|ignor|fall)\w*"
    r"|abort(?:ing|ed)?|exit(?:s|ed|ing)?|terminat(?:e|es|ing)|unrecoverable|stopping|shutting down"
    r"|after \d+ (?:attempts|retries|tries)|too many)\b|(?<!non-)(?<!non)\bfatal\b"
)
_AGAIN = re.compile(
    r"(?i)re-?tr(?:y|ies)|attempt|try|skip|ignor|fall\w*[- ]?back|continu|recover|reconnect"
)
_FAILED = re.compile(r"(?i)fail|error|exception|could not|cannot|can't|unable|caught")


def is_tolerated(text: str) -> bool:
    """Whether the program goes on after what this line says, by its own words."""
    if _GIVES_UP.search(text) is not None:
        return False
    counted = _COUNTED.search(text)
    if counted is not None:
        return int(counted["this"]) < int(counted["most"])
    return _GOES_ON.search(text) is not None


def takes_back(text: str) -> bool:
    """Whether an exception right above such a line was got over."""
    return _AGAIN.search(text) is not None and is_tolerated(text)


def announces(text: str) -> bool:
    """Whether a traceback right below such a line may be what it has got over: a logger shows it.
    It may also be that of the last attempt."""
    return _FAILED.search(text) is not None and is_tolerated(text)
