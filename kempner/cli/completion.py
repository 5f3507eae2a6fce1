"""`kempner completion`: a script that makes a shell complete the command line."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer import completion as by_typer

VARIABLE = "_KEMPNER_COMPLETE"
"""Set by the script as it starts `kempner` to ask for what may come next."""


class Shell(StrEnum):
    """Shells for which there is a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    app.command()(completion)


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that is to complete.")],
) -> int:
    """Print a script that completes commands and options.

    For bash: source <(kempner completion bash)
    """
    from kempner.cli.app import app

    prepare()
    command = typer.main.get_command(app)
    return by_typer.shell_complete(command, {}, "kempner", VARIABLE, f"source_{shell}")


def prepare() -> None:
    """Make typer know its shells, which it does only for applications with its own options."""
    by_typer.get_completion_inspect_parameters()
