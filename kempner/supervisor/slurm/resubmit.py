"""Submits the batch script again, where users may not requeue."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import submission_environment


def same_again(
    submit_line: str, arguments: Sequence[str], script: Path, without: Sequence[str] = ()
) -> list[str]:
    """The command that submits `script` as `submit_line` did its own, but not to some nodes.

    Slurm keeps that line without its quotes: what follows the script must be the `arguments` that
    reached kempner. Raises `ValueError` with a sentence if it is not, or in a job array.
    """
    handed_on = f" {' '.join(arguments)}"
    command = submit_line.removesuffix(handed_on).split()
    if not submit_line.endswith(handed_on) or len(command) < 2:
        raise ValueError(f"`{submit_line}` does not pass its arguments to kempner unchanged")
    if any(word.partition("=")[0] in ("-a", "--array") for word in command):
        raise ValueError(f"`{submit_line}` would submit all elements of the array again")
    excluded = [f"--exclude={','.join(without)}"] if without else []
    return [*command[:-1], *excluded, str(script), *arguments]


def resubmit(job: str, arguments: Sequence[str], folder: Path, without: Sequence[str]) -> str:
    """Submit the job's script again, with the resources and arguments that it had; the new id.

    It will not run on the nodes `without` which it is to go on.

    The script is kept in the attempt's `folder`, so that an attempt does this once at most. Raises
    `SlurmError` or `ValueError` with a sentence.
    """
    script = folder / "batch.sh"
    if script.exists():
        raise ValueError(f"{script} was already submitted")
    command = same_again(scontrol.submit_line(job), arguments, script, without)
    scontrol.write_script(job, script)
    # Without its own variables, which the new job would take for its own (a restart count, say).
    return scontrol.submit(command, submission_environment(os.environ))
