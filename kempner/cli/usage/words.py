"""Looks at the words of a command line before its command does: paths, options, a forgotten `--`.

A command that takes overrides lets every unknown option through, so it is here that one which is
no override gets its sentence.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from kempner.cli.usage.errors import unknown_option
from kempner.config.errors import quote, shorten
from kempner.config.section import expand_home
from kempner.run.process.exit_codes import UsageError

_NO_PATH = (errno.ELOOP, errno.ENAMETOOLONG)
"""Error numbers of a path that nothing can be at."""

_PROGRAMS = ("python", "python3", "bash", "sh", "torchrun", "accelerate", "deepspeed", "uv")

_NEW_NAME = "a new --run.name=NAME starts a run anew"
_SAME_COMMAND = "the same command continues from the newest checkpoint"
_ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("--resume", "--continue", "--restart", "--auto-resume"), _SAME_COMMAND),
    **dict.fromkeys(("--force", "--overwrite", "--fresh", "--from-scratch"), _NEW_NAME),
    **dict.fromkeys(
        ("--dry-run", "--check", "--validate"), "kempner config check CONFIG checks without a start"
    ),
    **dict.fromkeys(
        ("--config", "--config-file", "-c", "--conf"), "name the file without an option"
    ),
    **dict.fromkeys(
        ("--gpus", "--num-gpus", "--nproc-per-node", "--nproc_per_node", "--world-size", "-n"),
        "kempner supervise --nproc N starts N ranks on this machine",
    ),
    **dict.fromkeys(("--nproc", "--launcher", "--jobid"), "it is one of kempner supervise"),
    **dict.fromkeys(("--nodes", "--nnodes", "-N"), "ask Slurm for nodes: see docs/slurm.md"),
    **dict.fromkeys(
        ("--name", "--run-name", "--run_name"), "write --run.name=NAME after the configuration"
    ),
    **dict.fromkeys(
        ("--output", "--output-dir", "--out", "--outdir"),
        "write --run.dir=FOLDER after the configuration",
    ),
}
"""What to say about options that other tools have."""


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raise `UsageError` for an empty word: as a path it would mean the current folder."""
    for position, word in enumerate(arguments, start=1):
        if word == "--":
            return
        if not word:
            before = f" after {shorten(arguments[position - 2])}" if position > 1 else ""
            raise UsageError(f"an argument{before} is empty: is a variable of the shell not set?")
        name, equals, value = word.partition("=")
        if equals and not value and name.startswith("--") and "." not in name:
            raise UsageError(f"{name}= has no value: is a variable of the shell not set?")


def check_paths(command: Any) -> None:
    """Let `command`, and those below it, expand `~` in paths, and refuse what can be none."""
    for below in getattr(command, "commands", {}).values():
        check_paths(below)
    if command.callback is not None:
        command.callback = _with_paths(command.callback)


def overrides(
    context: typer.Context, file: Path | str | None, has_command: bool = False
) -> list[str]:
    """The arguments after the configuration, or raise `UsageError` for one that cannot be for us.

    `file` is what stands in the place of the configuration, if anything does; `has_command` is
    whether a command follows a `--`.
    """
    if file is not None and not has_command:
        _refuse_program(str(file), context)
    for word in (str(file or ""), *context.args):
        if word.startswith("-"):
            _refuse_option(word, context)
    return context.args


def _with_paths(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def call(*args: Any, **values: Any) -> Any:
        return callback(*args, **{name: _checked(value) for name, value in values.items()})

    return call


def _checked(value: Any) -> Any:
    if isinstance(value, Path):
        return usable_path(value)
    if isinstance(value, str) and re.match(r"~\w*/", value):
        return str(usable_path(Path(value)))
    if isinstance(value, list):
        return [_checked(item) for item in value]
    return value


def usable_path(path: Path) -> Path:
    """`path`, with `~` expanded. Raises `UsageError` if nothing can be there."""
    try:
        path = Path(expand_home(str(path)))
        path.stat()
    except OSError as error:
        if error.errno in _NO_PATH:
            raise UsageError(
                f"{shorten(str(path))} cannot be a path: {os.strerror(error.errno)}"
            ) from None
    except ValueError as error:  # a null character, or nobody's home
        raise UsageError(f"{shorten(str(path))} cannot be a path: {error}") from None
    return path


def _refuse_option(word: str, context: typer.Context) -> None:
    """Raise `UsageError` if the word is an option that the command has not, and no override."""
    name, equals, _ = word.partition("=")
    if word.strip("-") == "" or "." in name:
        return
    path = context.command_path
    if name in _ADVICE and name not in _options(context):
        raise UsageError(f"there is no option {name}: {_ADVICE[name]} (see {path} -h)")
    from kempner.config.loading import known_keys  # imports all sections

    keys = known_keys()
    if name.lstrip("-").replace("-", "_") in {part for key in keys for part in key.split(".")}:
        _refuse_bare_key(word, keys, path)
        return
    sentence = unknown_option(name, _options(context))
    if "did you mean" in sentence or not equals:
        raise UsageError(f"{sentence} (see {path} -h)")


def _refuse_bare_key(word: str, keys: Sequence[str], path: str) -> None:
    """Raise `UsageError` for a key without its section, unless the overrides' parser says more."""
    name, equals, value = word.partition("=")
    bare = name.lstrip("-").replace("-", "_")
    found = [key for key in keys if key.rpartition(".")[2] == bare]
    if found and not (equals and name == f"--{bare}"):
        meant = " or ".join(f"--{key}={value or 'VALUE'}" for key in found)
        raise UsageError(f"unknown option {shorten(name)}; did you mean {meant}? (see {path} -h)")


def _options(context: typer.Context) -> list[str]:
    return [name for parameter in context.command.params for name in parameter.opts if "-" in name]


def _refuse_program(file: str, context: typer.Context) -> None:
    """Raise `UsageError` if a program stands where a configuration should."""
    name = Path(file).name
    script = name.endswith((".py", ".sh"))
    if not script and (name not in _PROGRAMS or Path(file).is_file()):
        return
    command = [*(["python"] if name.endswith(".py") else []), file, *context.args]
    raise UsageError(
        f"{quote(file)} is a program, not a configuration; write -- before a command of your own: "
        f"kempner supervise -- {shorten(' '.join(command))}"
    )
