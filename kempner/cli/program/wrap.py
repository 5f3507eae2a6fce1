"""Commands for a user's own program: `kempner wrap` makes its batch script survive time limits,
preemption and crashes; `kempner rehearse` shows whether it resumes exactly after a stop and a
kill."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.progress import busy
from kempner.cli.usage import TakesCommand
from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError, SlurmMissingError
from kempner.project.wrap.decide import Refused, Wrapped, diff, wrap
from kempner.run.output.console import say
from kempner.run.process.exit_codes import ExitCode, UsageError, cannot_read, cannot_write

app = typer.Typer(rich_markup_mode=None)


@app.command("wrap")
def _wrap(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A batch script, as sbatch takes it.")
    ],
    write: Annotated[
        bool, typer.Option("--write", help="Change SCRIPT, and keep it as SCRIPT.bak.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the new script to this file.")
    ] = None,
    line: Annotated[
        int | None,
        typer.Option(min=1, help="Line of the training command, where several could be it."),
    ] = None,
) -> None:
    """Show what makes a batch script survive: as a diff, which --write or -o carries out.

    Its job is then warned before its end, requeued, and continued; kempner starts the ranks that
    srun, torchrun or accelerate started. What cannot be changed safely is refused in a sentence.
    Where sbatch is there, `sbatch --test-only` checks the result first.
    """
    if write and output is not None:
        raise UsageError("--write and --output exclude each other")
    try:
        before = script.read_bytes()
    except OSError as error:
        raise cannot_read(script, error) from error
    found = wrap(before, sys.executable, script.name, line or 0)
    if isinstance(found, Refused):
        raise UsageError(f"{script}: {found.sentence}")
    typer.echo(diff(before, found, str(script)), nl=False)
    for number, reason in found.reasons:
        typer.echo(f"line {number}: {reason}", err=True)
    typer.echo(f"sbatch --test-only: {_check(script, found)}", err=True)
    if write or output is not None:
        typer.echo(_carry_out(script, output, found.text), err=True)
    else:
        typer.echo("nothing was changed: --write or -o FILE does so", err=True)


def _carry_out(script: Path, output: Path | None, text: bytes) -> str:
    """Write the new script to `output`, or replace the old one; returns what was done."""
    kept = script.with_name(f"{script.name}.bak")
    target, new = (script, kept) if output is None else (output, output)
    if new.exists():
        raise UsageError(f"{new} is there already: name a new file, or delete it")
    outcome = f"wrote {target}" + (f"; {kept} is the script as it was" if output is None else "")
    try:
        if output is None:
            shutil.copy2(script, kept)
    except OSError as error:
        raise cannot_write(kept, error) from error
    try:
        target.write_bytes(text)
        target.chmod(script.stat().st_mode & 0o777)
    except OSError as error:
        raise cannot_write(target, error) from error
    return (
        f"{outcome}\nthe program must go on from its own checkpoint when it is started again: "
        "`kempner rehearse -- COMMAND` shows whether it does"
    )


def _check(script: Path, found: Wrapped) -> str:
    """Have `sbatch --test-only` check the new script; returns the result in words. Raises
    `UsageError` if sbatch would refuse it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / script.name
        copy.write_bytes(found.text)
        try:
            scontrol.try_submission(copy, os.environ)
        except SlurmMissingError:
            return "not asked, as sbatch is not on this machine"
        except SlurmError as error:
            raise UsageError(f"{script} was left as it is: {error}") from error
    return "accepted"


@app.command(cls=TakesCommand)
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
    from kempner.rehearse.rehearsal import Rehearsal, Stage
    from kempner.rehearse.report import report

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
    runs = Path("runs").absolute()
    try:
        runs.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="rehearsal-", dir=runs))
    except OSError as error:
        raise UsageError(f"rehearse: {runs} cannot be written: {error.strerror}") from error
