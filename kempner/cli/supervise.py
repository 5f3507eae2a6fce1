"""`kempner supervise`: the daemon."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.config import TAKES_OVERRIDES, ConfigFile
from kempner.config.loading import load
from kempner.run import logs
from kempner.run.exit_codes import ExitCode
from kempner.run.layout import RunDirectory
from kempner.run.signals import inbox
from kempner.supervisor.local import LocalLauncher
from kempner.supervisor.supervise import supervise as follow


class LauncherName(StrEnum):
    """Who starts the ranks."""

    LOCAL = "local"


def register(app: typer.Typer) -> None:
    """Adds `supervise` to `app`."""
    app.command(context_settings=TAKES_OVERRIDES)(supervise)


def supervise(
    context: typer.Context,
    file: ConfigFile,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks on this machine.")] = 1,
    launcher: Annotated[
        LauncherName, typer.Option(help="Who starts the ranks; local: as children of this process.")
    ] = LauncherName.LOCAL,
) -> ExitCode:
    """Launch the ranks of CONFIG (then --section.key=value), follow them, and say how it ended.

    Ctrl-C or SIGTERM stops after the current step with a checkpoint; the same command goes on from
    there. A second Ctrl-C within two seconds leaves at once.
    """
    inbox().install()
    logs.configure()
    config = load(file, context.args)
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    launchers = {LauncherName.LOCAL: LocalLauncher}
    chosen = launchers[launcher](run, nproc)
    arguments = [str(file), *context.args]
    return follow(run, chosen, arguments, nproc, config.supervise, inbox())
