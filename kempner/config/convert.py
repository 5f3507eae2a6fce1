"""Converts YAML configurations of torchforge and torchtitan to TOML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from kempner.config.errors import ConfigError, quote, unknown
from kempner.config.loading import known_keys, read_file
from kempner.config.overrides import RESOURCES, place, translate

_RENAMED: Mapping[str, str] = {
    "training.steps": "train.max_steps",
    "training.local_batch_size": "train.micro_batch_size",
    "training.global_batch_size": "train.global_batch_size",
    "training.seq_len": "train.seq_len",
    "training.max_norm": "train.clip_grad_norm",
    "training.seed": "train.seed",
    "training.deterministic": "train.deterministic",
    "training.compile": "train.compile",
    "compile.enable": "train.compile",
    "activation_checkpoint.mode": "train.activation_checkpointing",
    "lr_scheduler.warmup_steps": "scheduler.warmup_steps",
    "lr_scheduler.decay_type": "scheduler.name",
    "lr_scheduler.min_lr_factor": "scheduler.min_lr_ratio",
    "checkpoint.folder": "checkpoint.dir",
    "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "checkpoint.async_mode": "checkpoint.async_save",
    "metrics.log_freq": "metrics.log_interval",
    "metrics.enable_tensorboard": "metrics.tensorboard",
    "metric_logging.wandb.project": "metrics.wandb",
}
"""kempner's names of torchtitan's keys, which torchforge uses, too."""

_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "optimizer.name": lambda name: name.lower() if isinstance(name, str) else name,
    "checkpoint.async_save": lambda mode: mode if isinstance(mode, bool) else mode != "disabled",
}
"""Conversions of values that differ there, by kempner's key."""

_PRESET = "a published model is named by model.preset: kempner config explain model.preset"
_DATA = "tokens are written once, by kempner prepare, and named by data.dataset_path"
_ADVICE: Mapping[str, str] = {
    "model.name": _PRESET,
    "model.flavor": _PRESET,
    "training.dataset": _DATA,
    "training.dataset_path": _DATA,
    "training.datasets": _DATA,
}

_GLOBAL_BATCH = (
    "train.global_batch_size is not in the file: set it to the sequences of all ranks in a step, "
    "whose default is 8"
)


@dataclass
class ConvertedConfig:
    """A configuration in TOML, and a sentence for each key that was left out or is missing."""

    table: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def toml(self) -> str:
        return tomli_w.dumps(self.table) + "".join(f"# {line}\n" for line in self.remarks)


class _Loader(yaml.SafeLoader):
    """Reads `1e-5` as a number, as in YAML 1.2, and refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for n, key in enumerate(keys) if key in keys[:n] and key != "<<"), None)
        if twice is not None:
            raise yaml.MarkedYAMLError(
                problem=f"{twice} is given twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def convert(path: Path) -> ConvertedConfig:
    """Convert the YAML file at `path`. Raises `ConfigError` if it is missing, or not a YAML table,
    `OSError` if storage fails."""
    made, known = ConvertedConfig(), known_keys()
    for keys, value in _leaves(_parse(path), known):
        _convert_key(made, keys, value, known)
    train = made.table.get("train", {})
    if "micro_batch_size" in train and "global_batch_size" not in train:
        made.remarks.append(_GLOBAL_BATCH)
    return made


def _parse(path: Path) -> Mapping[Any, Any]:
    try:
        content = yaml.load(read_file(path).decode("utf-8-sig"), _Loader)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place_in_file = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{path}{place_in_file}: not valid YAML: {problem}") from None
    except (ValueError, RecursionError) as error:  # a date or a nesting beyond all bounds
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds no keys; name a configuration in YAML")
    return content


def _leaves(
    table: Mapping[Any, Any], known: list[str], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value that is not a table, or belongs to a known key, with its keys."""
    for key, value in table.items():
        keys = (*above, str(key))
        if isinstance(value, Mapping) and ".".join(keys) not in known:
            yield from _leaves(value, known, keys)
        else:
            yield keys, value


def _convert_key(
    made: ConvertedConfig, keys: tuple[str, ...], value: Any, known: list[str]
) -> None:
    given = ".".join(keys)
    name = _RENAMED.get(given, given)
    if value is None or (given.endswith("_parallel_degree") and name not in known and value == 1):
        return  # no information
    if isinstance(value, str) and "${" in value:
        reason = "refers to another value; write that"
    elif keys[0] in RESOURCES:
        try:
            resources: dict[str, Any] = {}
            place(resources, keys, value)
            for key, meant in translate(resources)[0].get("slurm", {}).items():
                place(made.table, ("slurm", key), meant)
            return
        except ConfigError as error:
            reason = str(error).removeprefix(f"{given}").lstrip(": ")
    elif name in known:
        place(made.table, name.split("."), _VALUES.get(name, lambda same: same)(value))
        return
    else:
        reason = _ADVICE.get(given) or unknown(given.split("."), [], known)
        if "; the " in reason:  # a list of all names
            reason = "kempner has nothing like it"
    made.remarks.append(f"left out {given} = {quote(value)}: {reason}")
