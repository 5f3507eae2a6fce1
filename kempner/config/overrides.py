"""Overrides on the command line: `--section.key=value`, the value written as in TOML.

Also translates torchforge's resources (`[provisioner]`, `[actors.trainer]`) to keys of `[slurm]`;
kempner starts no other actors than the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli

from kempner.config.errors import ConfigError, dotted, quote, shorten, unknown

_FORM = "overrides are written --section.key=value"


@dataclass(frozen=True)
class Override:
    """One argument: its keys, its value, and its text."""

    keys: tuple[str, ...]
    value: object
    argument: str


def parse(arguments: Sequence[str], known: Sequence[str]) -> list[Override]:
    """Parse the arguments; `known` are the dotted keys that may be set.

    A value that is not valid TOML is a string, so that paths and names need no quotes; the strict
    types refuse it for other keys. Raises `ConfigError` for a malformed argument, an unknown key,
    and a key that is set twice.
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
    """Set the value at `keys` in a nested table. Raises `ConfigError` if a key on the way is not a
    table."""
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
        # Only a value, nothing before or after it, is valid both behind an equals sign and inside
        # brackets: `5 # a comment` and `5, 6` are each refused by one of the two.
        tomli.loads(f"value = [{text}]")
        return tomli.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError) as error:
        if text.startswith(('"', "'")):
            raise ConfigError(f"{where}: {name} has an unclosed quote: {error}") from None
        return text


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


_PROVISIONER = {
    "launcher": "launcher",
    "cpu": "cpus",
    "memory_mb": "memory_mb",
    "gpus_per_node": "gpus_per_node",
}
_TRAINER = {"procs": "procs", "hosts": "hosts"}
_LAUNCHERS = {"slurm": "srun", "srun": "srun", "torchrun": "torchrun", "local": "local"}


def translate(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The table with `provisioner` and `actors` (in older files `processes`) translated to keys of
    `slurm`, and a sentence for each. Raises `ConfigError` for a key without a meaning here, or one
    that `slurm` sets differently."""
    rest = {name: value for name, value in table.items() if name not in RESOURCES}
    sentences: list[str] = []
    slurm = dict(rest.get("slurm") or {}) if isinstance(rest.get("slurm") or {}, Mapping) else {}
    for place, key, value in _given(table):
        name, meant = _meaning(place, key, value)
        if name is None:
            continue
        if slurm.get(name, meant) != meant:
            raise ConfigError(
                f"{place}.{key} is slurm.{name}, which is {quote(slurm[name])}; remove one"
            )
        slurm[name] = meant
        sentences.append(f"{place}.{key} is read as slurm.{name}={quote(meant)}")
    return ({**rest, "slurm": slurm} if sentences else rest), sentences


RESOURCES = ("provisioner", "actors", "processes")


def _given(table: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    found: list[tuple[str, str, Any]] = []
    for name in RESOURCES:
        inside = table.get(name, {})
        if not isinstance(inside, Mapping):
            raise ConfigError(f"{name} must be a table of keys, not {quote(inside)}")
        if name == "processes" and not any(isinstance(v, Mapping) for v in inside.values()):
            inside = {"trainer": inside}  # the form before there were other actors
        if name != "provisioner":
            others = sorted(set(inside) - {"trainer"})
            if others:
                raise ConfigError(
                    f"{name}.{others[0]}: kempner starts a trainer and no other actors; remove it"
                )
            inside, name = inside.get("trainer", {}), f"{name}.trainer"
            if not isinstance(inside, Mapping):
                raise ConfigError(f"{name} must be a table of keys, not {quote(inside)}")
        found += [(name, key, value) for key, value in inside.items()]
    return found


def _meaning(place: str, key: str, value: Any) -> tuple[str | None, Any]:
    """The key of `[slurm]` and its value; None if nothing needs to be set."""
    known = _PROVISIONER if place == "provisioner" else _TRAINER
    if place != "provisioner" and key == "with_gpus":
        return (None, None) if value else ("gpus_per_node", 0)
    if key not in known:
        raise ConfigError(
            f"{place}.{key} means nothing to kempner; the keys here are "
            f"{', '.join([*known, *([] if place == 'provisioner' else ['with_gpus'])])}"
        )
    if key == "launcher":
        if value not in _LAUNCHERS:
            demand = "must be slurm, torchrun or local"
            raise ConfigError(f"{place}.launcher {demand}, not {quote(value)}")
        return "launcher", _LAUNCHERS[value]
    return known[key], value
