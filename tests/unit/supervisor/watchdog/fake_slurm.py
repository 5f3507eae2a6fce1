"""A scontrol that keeps one job in a folder: for a process that asks for job 7 with it on PATH."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

_SCRIPT = """#!/bin/bash
case "$*" in
"show job"*)
  read -r state restarts end < {folder}/job
  echo "JobId=7 JobName=x UserId=root(0) JobState=$state Reason=None Requeue=1 Restarts=$restarts \
BatchFlag=1 TimeLimit=00:01:40 EndTime=$end NumNodes=1 NodeList=here Partition=all Command=x" ;;
"show config"*)
  printf 'Configuration data as of %(%Y-%m-%dT%H:%M:%S)T\\nKillWait                = 30 sec\\n\
SlurmdTimeout           = 300 sec\\nSLURM_VERSION           = 22.05.8\\n' -1 ;;
"show step"*)
  echo "StepId=7.batch UserId=0"
  [ -e {folder}/ranks ] && echo "StepId=7.0 UserId=0" ;;
"requeue"*)
  read -r state restarts end < {folder}/job
  printf '%(%s)T %s\\n' -1 "$state" >> {folder}/requeues
  if [ "$state" = RUNNING ]; then
    echo "PENDING $((restarts + 1)) $end" > {folder}/job.new
    mv {folder}/job.new {folder}/job
  else
    echo "Job is pending execution for job 7" >&2
    exit 1
  fi ;;
esac
exit 0
"""


def install(folder: Path) -> dict[str, str]:
    """Put it into a folder; the environment of a batch process of the job."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("scontrol", "scancel"):
        (programs / name).write_text(_SCRIPT.format(folder=folder))
        (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return kept | {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


def write_job(folder: Path, state: str, restarts: int, end: float) -> None:
    """Have the job be so, until `end` (seconds since the epoch)."""
    told = datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    (folder / "job.new").write_text(f"{state} {restarts} {told}\n")
    (folder / "job.new").rename(folder / "job")


def job_ends(folder: Path, seconds: float) -> None:
    """Have it run for `seconds` from now, the time of the file `ends`."""
    write_job(folder, "RUNNING", 0, time.time() + seconds)
    (folder / "ends").touch()


def requeues(folder: Path) -> list[float]:
    """When it was taken back, in seconds since the epoch."""
    try:
        lines = (folder / "requeues").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [float(line.split()[0]) for line in lines if line.endswith("RUNNING")]
