"""`kempner rehearse`: does a program of one's own come back exactly after a stop and a kill?"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.progress import busy
from kempner.cli.usage import TakesCommand
from kempner.run.output import logs
from kempner.run.output.console import say
from kempner.run.process.exit_codes import ExitCode, UsageError


def register(app: typer.Typer) -> None:
    app.command(cls=TakesCommand)(rehearse)


def rehearse(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=5, help="Steps that are rehearsed.")] = 20,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks on this machine.")] = 1,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the folder with what the ranks have seen.")
    ] = False,
) -> ExitCode:
    """Prove that a program resumes exactly: kempner rehearse -- python train.py.

    Runs it for some steps in a folder of its own, undisturbed, and stopped and killed where it
    saves, evaluates or ends an epoch, with several ranks also on another number of them; then says
    what came back and what did not. Exits with 1 if something did not.
    """
    command: tuple[str, ...] = context.obj
    if not command:
        raise UsageError("name a command after `--`: kempner rehearse -- python train.py")
    logs.configure()
    from kempner.rehearse.rehearsal import Rehearsal
    from kempner.rehearse.report import report
    from kempner.rehearse.stage import Stage

    scratch = _scratch()
    try:
        with busy("running it undisturbed, stopped and killed"), Stage().open() as stage:
            rehearsal = Rehearsal(command, steps, nproc, scratch, stage, say)
            text, code = report(rehearsal.run(), nproc)
        say(text)
        return code
    finally:
        if keep:
            say(f"what the ranks have seen is in {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def _scratch() -> Path:
    """A new folder beside the runs, where there is room for checkpoints."""
    runs = Path("runs").absolute()
    try:
        runs.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="rehearsal-", dir=runs))
    except OSError as error:
        raise UsageError(f"rehearse: {runs} cannot be written: {error.strerror}") from error
