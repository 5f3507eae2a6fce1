"""Finds the run that a user names by its directory, its name, or its Slurm job."""

from __future__ import annotations

import re
from pathlib import Path

from kempner.cli.usage import usable_path
from kempner.cluster.slurm.command import SHORTLY
from kempner.insight.status.job import find_run
from kempner.insight.status.runs import find_runs, places
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.run_dir import RunDirectory

RUN = "A run's directory or name, or its Slurm job."  # help of an argument for `run_of`

RUN_METAVAR = "RUN_DIR|JOBID"


def is_job(target: str) -> bool:
    """Whether this is the id of a Slurm job or array element, and not a path."""
    return bool(re.fullmatch(r"\d+(_\d+)?", target)) and not Path(target).exists()


def named_run(target: str) -> RunDirectory:
    """The run with this directory or name. Raises `UsageError` if there is none, or several."""
    run = RunDirectory(usable_path(Path(target)))
    if run.ledger.is_file():
        return run
    named = [] if "/" in target else [r for r in find_runs(places(Path())) if r.path.name == target]
    if len(named) > 1:
        raise UsageError(f"{target} may be {' or '.join(str(r.path) for r in named)}: name one")
    if not named:
        raise UsageError(
            f"{target} is not a run: it has no ledger.jsonl; name <run.dir>/<run.name>, or a job id"
        )
    return named[0]


def run_of(target: str, within: float = SHORTLY) -> RunDirectory:
    """The run with this directory, name or job. Raises `UsageError` if there is none yet."""
    if not is_job(target):
        return named_run(target)
    run = find_run(target, find_runs(places(Path())), within)
    if run is None or not run.ledger.is_file():
        raise UsageError(f"job {target} has not started a run yet: `kempner status {target}`")
    return run
