"""The commands: one module each, which adds itself."""

from __future__ import annotations

from typing import Annotated

import typer

import kempner
from kempner.cli import checkpoint, checkpoint_convert, config, prepare, status, supervise, train

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train with PyTorch on a shared cluster, whatever happens to the job.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kempner {kempner.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


for command in (prepare, train, supervise, status, checkpoint, checkpoint_convert, config):
    command.register(app)
