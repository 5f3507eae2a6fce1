"""`kempner wrap`: makes a batch script survive time limits, preemption and crashes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError, SlurmMissingError
from kempner.project.wrap.decide import Refused, Wrapped, diff, wrap
from kempner.run.process.exit_codes import UsageError, cannot_read, cannot_write


def register(app: typer.Typer) -> None:
    app.command("wrap")(_wrap)


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
    before = _read(script)
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
    """Write the new script to `output`, or in the place of the old one; what was done."""
    if output is None:
        kept = script.with_name(f"{script.name}.bak")
        _copy(script, kept)
        told = f"wrote {script}; {kept} is the script as it was"
    else:
        _refuse_if_there(output)
        told = f"wrote {output}"
    _write(output or script, script, text)
    return (
        f"{told}\nthe program must go on from its own checkpoint when it is started again: "
        "`kempner rehearse -- COMMAND` shows whether it does"
    )


def _read(script: Path) -> bytes:
    try:
        return script.read_bytes()
    except OSError as error:
        raise cannot_read(script, error) from error


def _check(script: Path, found: Wrapped) -> str:
    """What sbatch says of the new script, submitted from where the old one would be.

    Raises `UsageError` if it would refuse it.
    """
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


def _refuse_if_there(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{path} is there already: name a new file, or delete it")


def _copy(script: Path, kept: Path) -> None:
    _refuse_if_there(kept)
    try:
        shutil.copy2(script, kept)
    except OSError as error:
        raise cannot_write(kept, error) from error


def _write(target: Path, script: Path, text: bytes) -> None:
    try:
        target.write_bytes(text)
        target.chmod(script.stat().st_mode & 0o777)
    except OSError as error:
        raise cannot_write(target, error) from error
