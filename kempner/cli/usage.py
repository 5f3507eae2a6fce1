"""Checks the command line before the command runs: paths, options, a forgotten `--`.

A command that takes overrides lets unknown options pass; here those that are no overrides are
refused in a sentence. typer does not export the classes of its errors, so they are recognised by
their names and fields. Also has `kempner completion`.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import completion as by_typer
from typer.core import TyperCommand

from kempner.config.errors import DEMANDS, quote, shorten
from kempner.config.section import expand_home
from kempner.run.process.exit_codes import UsageError

_MEANT = {
    "run start launch resume restart continue": "supervise",
    "ls list checkpoints": "checkpoint list",
    "ps show info": "status",
    "log tail output": "logs",
    "kill cancel end abort": "stop",
    "evaluate validate perplexity": "eval",
}
"""Commands of other tools, and kempner's equivalent."""

_MOVED = {
    "kempner experts": "kempner plan MODEL --world N",
    "kempner checkpoint compare": "kempner compare A B",
}
"""Commands of earlier versions, and their replacement."""

_BELOW = {"schema keys describe": "explain"}
"""As `_MEANT`, for commands of a group; `config schema` existed once."""

_PARSING = {
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of at most 64 bits",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
}
"""As `DEMANDS`, for pydantic's error types of text from a command line."""


def help_asked_for(error: Any, arguments: Sequence[str]) -> str | None:
    """The help of a group of commands that was called without one; None for a mistake."""
    context, kind = getattr(error, "ctx", None), type(error).__name__
    if kind != "UsageError" or context is None or not _is_group(context.command):
        return None
    return None if _words_given(context, arguments) else str(context.get_help())


def explain(error: Any, arguments: Sequence[str]) -> str:
    """Describe one of typer's errors in a clause; `arguments` are the process's."""
    context, kind = getattr(error, "ctx", None), type(error).__name__
    match kind:
        case "NoSuchOption":
            return unknown_option(error.option_name, list(error.possibilities or ()))
        case "MissingParameter":
            text = (getattr(error.param, "help", None) or "").partition(". ")[0].rstrip(".")
            meaning = f": {text[:1].lower()}{text[1:]}" if text else ""
            return f"{_name(error.param)} is missing{meaning}"
        case "BadOptionUsage":
            surplus = any(word.startswith(f"{error.option_name}=") for word in arguments)
            return f"{error.option_name} {'takes no' if surplus else 'needs a'} value"
        case "BadParameter" if error.param is not None:
            return _bad_value(error)
        case "UsageError" if context is not None and _is_group(context.command):
            return _no_such_command(context, arguments)
        case "UsageError" if found := re.search(r"unexpected extra .*\((.*)\)$", error.message):
            return f"too many arguments: {shorten(found[1])}"
    return str(error.format_message()).rstrip(".")


def unknown_option(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"unknown option {shorten(name)}" + (f"; did you mean {near[0]}?" if near else "")


def _bad_value(error: Any) -> str:
    name = _name(error.param)
    cause = error.__cause__
    if cause is None or not hasattr(cause, "errors"):
        return f"{name}: {error.message.rstrip('.')}"
    details = cause.errors(include_url=False)[0]
    value, context = details["input"], details.get("ctx", {})
    choices = getattr(getattr(error.param, "type_descriptor", None), "choices", None)
    if choices:
        names = [str(getattr(choice, "value", choice)) for choice in choices]
        near = get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        return f"{name} must be {listed}, not {quote(value)}{hint}"
    bounds = {name: f"{x:g}" if isinstance(x, float) else x for name, x in context.items()}
    demand = (_PARSING.get(details["type"]) or DEMANDS.get(details["type"], "")).format(**bounds)
    shown = quote(value) if details["type"] in _PARSING else shorten(str(value))
    return f"{name} {demand}, not {shown}" if demand else f"{name} cannot be {quote(value)}"


def _no_such_command(context: Any, arguments: Sequence[str]) -> str:
    path, typed = context.command_path, _words_given(context, arguments)[0]
    names = list(context.command.list_commands(context))
    if (moved := _MOVED.get(f"{path} {typed}")) is not None:
        return f"{path} {typed} is part of another command now: {moved}"
    below = {
        inner: f"{name} {inner}"
        for name in names
        for inner in getattr(context.command.get_command(context, name), "commands", {})
    }
    near = get_close_matches(typed, names, n=1)
    if (meant := _named(typed, _BELOW)) in names:
        near = [str(meant)]
    if " " not in path:
        exact = [meant for meant in (_named(typed, _MEANT), below.get(typed)) if meant]
        near = exact[:1] or near or [below[name] for name in get_close_matches(typed, below, n=1)]
    hint = f"; did you mean {' or '.join(f'{path} {name}' for name in near)}?" if near else ""
    all_names = "" if near else f"; the commands are {', '.join(names)}"
    return f"there is no {path} {shorten(typed)}{hint}{all_names}"


def _named(word: str, table: Mapping[str, str]) -> str | None:
    return next((meant for names, meant in table.items() if word in names.split()), None)


def _words_given(context: Any, arguments: Sequence[str]) -> Sequence[str]:
    """The words after a group, its command first: groups have no options of their own."""
    return arguments[context.command_path.count(" ") :]


def _is_group(command: Any) -> bool:
    return hasattr(command, "list_commands")


def _name(parameter: Any) -> str:
    option = next((name for name in parameter.opts if name.startswith("-")), None)
    return str(option or (parameter.metavar or parameter.name.upper()).replace("[STEP]", "STEP"))


_NO_PATH = (errno.ELOOP, errno.ENAMETOOLONG)  # error numbers of an impossible path

_PROGRAMS = ("python", "python3", "bash", "sh", "torchrun", "accelerate", "deepspeed", "uv")

_ADVICE = {
    "--resume --continue --restart --auto-resume": "the same command continues from the newest "
    "checkpoint",
    "--force --overwrite --fresh --from-scratch": "a new --run.name=NAME starts a run anew",
    "--dry-run --check --validate": "kempner config check CONFIG checks without a start",
    "--config --config-file -c --conf": "name the file without an option",
    "--gpus --num-gpus --nproc-per-node --nproc_per_node --world-size -n": "kempner supervise "
    "--nproc N starts N ranks on this machine",
    "--nproc --launcher --jobid": "it is one of kempner supervise",
    "--nodes --nnodes -N": "ask Slurm for nodes: see docs/slurm.md",
    "--name --run-name --run_name": "write --run.name=NAME after the configuration",
    "--output --output-dir --out --outdir": "write --run.dir=FOLDER after the configuration",
}
"""Advice about options of other tools."""


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
    """Make `command`, and those below it, expand `~` in paths, and refuse impossible paths."""
    for below in getattr(command, "commands", {}).values():
        check_paths(below)
    if (callback := command.callback) is not None:

        @functools.wraps(callback)
        def call(*args: Any, **values: Any) -> Any:
            return callback(*args, **{name: _checked(value) for name, value in values.items()})

        command.callback = call


def overrides(
    context: typer.Context, file: Path | str | None, has_command: bool = False
) -> list[str]:
    """The arguments after the configuration. Raises `UsageError` for one that cannot be an
    override. `file` is the word in the place of the configuration, if any; `has_command`: a command
    follows a `--`."""
    if file is not None and not has_command:
        _refuse_program(str(file), context)
    for word in (str(file or ""), *context.args):
        if word.startswith("-"):
            _refuse_option(word, context)
    return context.args


def _checked(value: Any) -> Any:
    if isinstance(value, Path):
        return usable_path(value)
    if isinstance(value, str) and re.match(r"~\w*/", value):
        return str(usable_path(Path(value)))
    if isinstance(value, list):
        return [_checked(item) for item in value]
    return value


def usable_path(path: Path) -> Path:
    """`path`, with `~` expanded. Raises `UsageError` for an impossible path."""
    why = ""
    try:
        path = Path(expand_home(str(path)))
        path.stat()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno in _NO_PATH else ""
    except ValueError as error:  # a null character, or `~name` of an unknown user
        why = str(error)
    if why:
        raise UsageError(f"{shorten(str(path))} cannot be a path: {why}")
    return path


def _refuse_option(word: str, context: typer.Context) -> None:
    name, equals, _ = word.partition("=")
    if word.strip("-") == "" or "." in name:
        return
    path = context.command_path
    advice, known = _named(name, _ADVICE), _options(context)
    if advice is not None and name not in known:
        raise UsageError(f"there is no option {name}: {advice} (see {path} -h)")
    from kempner.config.loading import known_keys  # imports all sections

    keys = known_keys()
    if name.lstrip("-").replace("-", "_") in {part for key in keys for part in key.split(".")}:
        _refuse_bare_key(word, keys, path)
        return
    sentence = unknown_option(name, known)
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


class TakesCommand(TyperCommand):
    """Everything after `--` is a command; its arguments are not options of kempner."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


app = typer.Typer(rich_markup_mode=None)

# Makes typer know its shells, which it does only for applications with its own options.
by_typer.get_completion_inspect_parameters()


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that is to complete.")],
) -> int:
    """Print a script that completes commands and options.

    For bash: source <(kempner completion bash)
    """
    from kempner.cli.app import app as everything

    command, variable = typer.main.get_command(everything), "_KEMPNER_COMPLETE"
    return by_typer.shell_complete(command, {}, "kempner", variable, f"source_{shell}")
