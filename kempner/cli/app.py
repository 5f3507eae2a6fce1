"""The command-line application: the module of a subcommand is imported when it is called, so that a
rank, or `kempner status` in a shell's prompt, does not import what other commands need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kempner
from kempner.cli.usage import check_paths

_EVERY_DAY: dict[str, tuple[str, ...]] = {
    "init": ("init",),
    "prepare": ("prepare",),
    "plan": ("insight.plan",),
    "doctor": ("insight.doctor",),
    "supervise": ("supervise",),
    "status": ("insight.status",),
    "logs": ("insight.logs",),
    "stop": ("program.stop",),
    "report": ("insight.report",),
    "triage": ("insight.triage",),
    "checkpoint": ("checkpoint.inspect", "checkpoint.convert", "checkpoint.push"),
    "eval": ("checkpoint.trained_on",),
    "sample": ("checkpoint.trained_on",),
}
_NOW_AND_THEN: dict[str, tuple[str, ...]] = {
    "wrap": ("program.wrap",),
    "rehearse": ("program.wrap",),
    "lab": ("program.lab_commands",),
    "heartbeat": ("program.heartbeat",),
    "train": ("train",),
    "join": ("supervise",),
    "metrics": ("insight.metrics",),
    "profile": ("insight.profile",),
    "replay": ("insight.replay",),
    "compare": ("insight.compare",),
    "config": ("config",),
    "download": ("checkpoint.download",),
    "prune": ("checkpoint.inspect",),
    "completion": ("usage",),
}
_GROUPS = {"Every day": _EVERY_DAY, "Now and then": _NOW_AND_THEN}
"""Commands in the order of `kempner --help`."""

_MODULES = _EVERY_DAY | _NOW_AND_THEN  # commands, and the modules that add them


@cache
def load_command(name: str) -> Any:
    first, *_ = [import_module(f"kempner.cli.{module}") for module in _MODULES[name]]
    command = typer.main.get_group(first.app).commands[name]
    check_paths(command)
    return command


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in _MODULES else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        limit = formatter.width - 6 - max(map(len, _MODULES))
        for title, names in _GROUPS.items():
            rows = [(name, load_command(name).get_short_help_str(limit)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=2 + max(map(len, _MODULES)))


def path_of(arguments: Sequence[str]) -> str:
    """The command in `arguments`, such as `kempner checkpoint list`, for a hint at its help."""
    words, below = ["kempner"], dict.fromkeys(_MODULES)
    for word in arguments:
        if word not in below:
            break
        words.append(word)
        below = getattr(load_command(word), "commands", {}) if words[2:] == [] else {}
    return " ".join(words)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fault-tolerant PyTorch training on a laptop or a Slurm cluster.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kempner {kempner.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
