"""`kempner heartbeat`: a program in any language reports its progress."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kempner.run.control.heartbeat_file import HEARTBEAT_FILE, Heartbeat, path_in, write
from kempner.run.process.exit_codes import UsageError

app = typer.Typer(rich_markup_mode=None)


@app.command()
def heartbeat(
    step: Annotated[
        int | None, typer.Option(min=0, help="The last step that is done, since the run began.")
    ] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="The run is complete: it is not requeued.")
    ] = False,
) -> None:
    """Report the progress of a supervised program, so that a hang is noticed. One rank, about once
    a minute, is enough. `echo STEP > "$KEMPNER_HEARTBEAT_FILE"` does the same. Outside of `kempner
    supervise` it does nothing."""
    if step is None and not complete:
        raise UsageError("say something: --step N, --complete, or both")
    if (path := path_in(os.environ)) is None:
        return
    try:
        write(path, Heartbeat(step, complete))
    except OSError as error:
        # The calling script, perhaps under `set -e`, must not fail because of this.
        reason = f"{HEARTBEAT_FILE}={path} cannot be written: {error.strerror}"
        typer.echo(f"kempner: {reason}", err=True)
