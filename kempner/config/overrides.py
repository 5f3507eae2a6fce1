"""Overrides on the command line: `--section.key=value`, the value written as in TOML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomli

from kempner.config.errors import ConfigError, dotted, quote, shorten, unknown

_FORM = "overrides are written --section.key=value"


@dataclass(frozen=True)
class Override:
    """One argument: where its value goes, the value, and the words it was given in."""

    keys: tuple[str, ...]
    value: object
    argument: str


def parse(arguments: Sequence[str], known: Sequence[str]) -> list[Override]:
    """Reads the arguments; `known` are the dotted keys that may be set.

    A value is read as TOML. What is no TOML value is taken as a string, so that paths and names
    need no quotes of their own; the strict types refuse it for a key that is not a string.

    Raises:
        ConfigError: an argument has another form, names no key, or sets a key a second time.
    """
    overrides: dict[str, Override] = {}
    for position, argument in enumerate(arguments):
        name, equals, text = argument.removeprefix("--").partition("=")
        if not (argument.startswith("--") and name and equals):
            raise ConfigError(_malformed(argument, arguments[position + 1 :]))
        where = shorten(argument)
        if name not in known:
            raise ConfigError(f"{where}: {_not_a_key(name, known)}")
        if name in overrides:
            first = overrides[name].argument
            raise ConfigError(f"{where}: {name} is set twice, first by {first}; give it once")
        overrides[name] = Override(tuple(name.split(".")), _value(name, text, where), where)
    return list(overrides.values())


def place(table: dict[str, Any], keys: Sequence[str], value: object) -> None:
    """Puts `value` at `keys` into nested `table`, adding tables on the way.

    Raises:
        ConfigError: something on the way is not a table.
    """
    for depth, key in enumerate(keys[:-1], start=1):
        below = table.setdefault(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{dotted(keys[:depth])} must be a table of keys, not {quote(below)}")
        table = below
    table[keys[-1]] = value


def _value(name: str, text: str, where: str) -> object:
    if not text.strip():
        raise ConfigError(f"{where}: no value after the equals sign; write --{name}=VALUE")
    try:
        return _toml_value(text)
    except (ValueError, RecursionError) as error:
        if text.startswith(('"', "'")):
            raise ConfigError(f"{where}: {name} has an unclosed quote: {error}") from None
        return text


def _toml_value(text: str) -> object:
    """The single TOML value that `text` is.

    Only a value, nothing before or after it, is valid both behind an equals sign and inside
    brackets: `5 # a comment` and `5, 6` are each refused by one of the two.

    Raises:
        ValueError, RecursionError: `text` is anything else.
    """
    tomli.loads(f"value = [{text}]")
    return tomli.loads(f"value = {text}")["value"]


def _not_a_key(name: str, known: Sequence[str]) -> str:
    first = next((key for key in known if key.startswith(f"{name}.")), None)
    if first is not None:
        return f"{name} is a section; set one of its keys, such as --{first}=VALUE"
    return unknown(name.split("."), [], known)


def _malformed(argument: str, rest: Sequence[str]) -> str:
    where = quote(argument)
    if not argument.startswith("--") or "=" in argument:
        return f"argument {where} is not understood; {_FORM}"
    if rest and not rest[0].startswith("--"):
        return f"argument {where} has no value; join the two words: {shorten(argument)}={rest[0]}"
    return f"argument {where} has no value; {_FORM}"
