"""Runs one short task on each of a job's nodes, in a step beside whatever runs there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from kempner.cluster.slurm.command import probe_environment

NO_GPUS = ("--gres=none",)
"""None of the job's GPUs: their number for the whole job does not fit every step."""


@dataclass(frozen=True)
class Told:
    """What the tasks printed as far as it came in time, and what they or srun complained about."""

    out: str = ""
    complaints: str = ""


def run_on_nodes(
    nodes: Sequence[str],
    allocation: str | None,
    task: Sequence[str],
    within: float,
    resources: Sequence[str] = NO_GPUS,
) -> Told:
    """Run `task` once on each of the `nodes`, all at once, and wait for `within` seconds.

    `allocation` is the job to do it in, None for the one around this process; `resources` are
    further options of srun. Nothing is told where there is no srun. Raises `OSError` if it cannot
    start.
    """
    if shutil.which("srun") is None:
        return Told()
    command = [
        *("srun", "--overlap", *resources),
        *([] if allocation is None else [f"--jobid={allocation}"]),
        "--job-name=kempner-health",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        "--export=ALL",
        *task,
    ]
    asked = subprocess.Popen(
        command,
        env=probe_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return Told(*asked.communicate(timeout=within))
    except subprocess.TimeoutExpired:
        asked.kill()
        return Told(*asked.communicate())
    except BaseException:  # whoever asks is told to leave: the tasks, too
        asked.terminate()
        raise
