"""The command-line application: one module per subcommand, each registers itself."""

from __future__ import annotations

from typing import Annotated

import typer

import kempner
from kempner.cli import checkpoint, checkpoint_convert, config, prepare, status, supervise, train

app = typer.Typer(
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


for command in (prepare, train, supervise, status, checkpoint, checkpoint_convert, config):
    command.register(app)
