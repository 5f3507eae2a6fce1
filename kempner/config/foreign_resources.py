"""Resources as torchforge and its kin name them: `[provisioner]` and `[actors.trainer]`.

Resources as torchforge and its kin name them: `[provisioner]` and `[actors.trainer]`.

They are read as the keys of `[slurm]` that mean the same, and each is explained. Only the trainer
counts: kempner starts no other actors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kempner.config.errors import ConfigError, quote

_PROVISIONER = {
    "launcher": "launcher",
    "cpu": "cpus",
    "memory_mb": "memory_mb",
    "gpus_per_node": "gpus_per_node",
}
_TRAINER = {"procs": "procs", "hosts": "hosts"}
_LAUNCHERS = {"slurm": "srun", "srun": "srun", "torchrun": "torchrun", "local": "local"}


def translate(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The table without `provisioner` and `actors` (in older files `processes`), but with what they
    say in `slurm`, and a sentence for each key that was read so.

    Raises `ConfigError` for a key that means nothing here, or that `slurm` sets differently.
    """
    rest = {name: value for name, value in table.items() if name not in RESOURCES}
    said: list[str] = []
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
        said.append(f"{place}.{key} is read as slurm.{name}={quote(meant)}")
    return ({**rest, "slurm": slurm} if said else rest), said


RESOURCES = ("provisioner", "actors", "processes")


def _given(table: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    found: list[tuple[str, str, Any]] = []
    for name in RESOURCES:
        inside = table.get(name, {})
        if not isinstance(inside, Mapping):
            raise ConfigError(f"{name} must be a table of keys, not {quote(inside)}")
        if name == "processes" and not any(isinstance(v, Mapping) for v in inside.values()):
            inside = {"trainer": inside}  # of the time when there was no other actor
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
    """The key of `[slurm]` and its value; no key if nothing needs to be said."""
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
