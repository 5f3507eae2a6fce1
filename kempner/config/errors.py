"""Error messages for a wrong configuration: place, key and remedy in one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class ConfigError(Exception):
    """The configuration is wrong: one sentence that says what, where and what to do."""


_LONGEST_QUOTE = 80

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of a run's name."""

SET_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
"""Pattern of a held-out set's name."""

PORTS = r"^[0-9]{1,5}-[0-9]{1,5}$"
"""Pattern of a range of ports."""

COLLECTOR = r"^(env|https?://.+)$"
"""Pattern of the address of an OpenTelemetry collector."""
_VERY_NEAR = 0.8
"""Similarity (`difflib`) above which one name counts as a misspelling of another."""

DEMANDS: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string in quotes",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list in square brackets",
    "too_short": "must have at least {min_length} values",
    "too_long": "must have at most {max_length} values",
    "model_type": "must be a table of keys",
    "dict_type": "must be a table of keys",
}
"""What pydantic's error types demand (https://docs.pydantic.dev/latest/errors/validation_errors/)."""


PATTERNS: Mapping[str, str] = {
    NAME: "must be of letters, digits, dots, dashes and underscores, and begin with a letter or "
    "digit",
    SET_NAME: "must be of letters, digits, dashes and underscores, and begin with a letter or a "
    "digit",
    PORTS: "must be two ports with a dash between them, such as 20000-20100",
    COLLECTOR: "must be a URL that begins with http:// or https://, or env",
}
"""The demands of these patterns in words."""
_OF_OTHER_TRAINERS: Mapping[str, str] = {
    "pipeline_parallel_degree": "kempner has no pipeline parallelism, as with 1",
    "context_parallel_degree": "kempner has no context parallelism, as with 1",
    "expert_parallel_degree": "kempner has no expert parallelism, as with 1",
}
"""Keys of other trainers, for which the most similar key here would be wrong."""


def quote(value: object) -> str:
    """`value` in TOML, shortened to keep the sentence readable."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        items = ("[...]" if isinstance(item, list) else quote(item) for item in value)
        return shorten(f"[{', '.join(items)}]")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return shorten(json.dumps(value, ensure_ascii=False))
    return shorten(str(value))


def shorten(text: str) -> str:
    """`text`, or its beginning and an ellipsis if it is too long for a sentence."""
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 3]}..."


def dotted(keys: Sequence[str | int]) -> str:
    """The key in dotted form: `optimizer.betas[1]` for ("optimizer", "betas", 1)."""
    named = (key for key in keys if key != "[key]")  # pydantic's mark of a wrong name in a table
    parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in named]
    return "".join(parts).removeprefix(".")


def describe_error(details: ErrorDetails, known: Sequence[str]) -> str:
    """One of pydantic's errors as a clause without its place; `known` are the dotted keys."""
    kind, keys, value = details["type"], details["loc"], details["input"]
    context: dict[str, Any] = details.get("ctx", {})
    if kind == "extra_forbidden":
        inside = list(value) if isinstance(value, Mapping) else []
        return unknown([str(key) for key in keys], inside, known)
    if kind == "value_error":  # raised by a validator that looks at several keys
        table = isinstance(value, Mapping)
        place = f"[{dotted(keys)}] " if keys and table else f"{dotted(keys)}: " if keys else ""
        return f"{place}{context['error']}"
    bounds = {name: f"{x:g}" if isinstance(x, float) else x for name, x in context.items()}
    rule = PATTERNS.get(str(context.get("pattern"))) or DEMANDS.get(kind, "").format(**bounds)
    demand = rule or f"is refused ({details['msg']})"
    return f"{dotted(keys)} {demand}, not {quote(value)}"


def unknown(keys: Sequence[str], inside: Sequence[str], known: Sequence[str]) -> str:
    """Name an unknown key or section and the most similar known one. `keys` is its path, `inside`
    are the keys of its table, `known` all dotted keys."""
    *table, key = keys
    if key in _OF_OTHER_TRAINERS:
        return f"unknown key {dotted(keys)}: {_OF_OTHER_TRAINERS[key]}; remove it"
    siblings = _children(table, known)
    guesses = (
        _named(key, known)
        or [dotted([*table, near]) for near in get_close_matches(key, siblings, 1, _VERY_NEAR)]
        or [name for near in _near(key, known) for name in _named(near, known)]
        or [dotted([*table, near]) for near in get_close_matches(key, siblings, n=1)]
        or [name for below in inside for name in _named(below, known)]
        or get_close_matches(dotted(keys), [] if siblings else known, n=1)
    )
    kind, name = "key" if table else "section", shorten(dotted(keys))
    if guesses:
        return f"unknown {kind} {name}; did you mean {' or '.join(guesses)}?"
    if siblings:
        return f"unknown {kind} {name}; the {kind}s here are {', '.join(siblings)}"
    sections = ", ".join(_children((), known))
    return f"unknown section {shorten(dotted(table))}; the sections are {sections}"


def _children(table: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names directly below `table`, in the order of the schema; none if it is unknown."""
    depth = len(table)
    paths = [name.split(".") for name in known]
    below = [path[depth] for path in paths if path[:depth] == list(table) and len(path) > depth]
    return list(dict.fromkeys(below))


def _near(key: str, known: Sequence[str]) -> list[str]:
    """The last part of the most similar key in any section."""
    parts = {name.rpartition(".")[2]: None for name in known}
    return get_close_matches(key, parts, 1, _VERY_NEAR)


def _named(key: str, known: Sequence[str]) -> list[str]:
    """The dotted keys whose last part is `key`."""
    return [name for name in known if name.rpartition(".")[2] == key]
