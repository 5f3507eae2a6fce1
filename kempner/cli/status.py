"""`kempner status`: where a run stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kempner.insight.status import read_status
from kempner.run.exit_codes import UsageError
from kempner.run.layout import RunDirectory


def register(app: typer.Typer) -> None:
    """Adds `status` to `app`."""
    app.command()(status)


def status(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory.")],
) -> None:
    """Say where a run stands: state, step, loss, newest checkpoint, and each rank's place."""
    run = RunDirectory(directory)
    if not run.ledger.exists():
        raise UsageError(
            f"{directory} is no run: it has no ledger.jsonl; give <run.dir>/<run.name>"
        )
    found = read_status(run)
    rows = {
        "state": found.state,
        "step": found.step,
        "loss": found.loss,
        "latest checkpoint": found.latest_checkpoint,
        "attempts": found.attempts,
        **dict(found.ranks),
    }
    for name, value in rows.items():
        typer.echo(f"{name:<18} {'-' if value is None else value}")
