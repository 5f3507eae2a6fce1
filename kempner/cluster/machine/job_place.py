"""Where in its Slurm job a process is: in the batch script, in a step, or in a shell beside them.

A variable alone says nothing. SLURM_STEP_ID is inherited from the shell that called sbatch if that
was in a step, and from Slurm 26.05 on it stands in the batch script, too.

When this process began, which may be long before it became what it is.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil


class JobPlace(Enum):
    """What a process is in its job."""

    BATCH_SCRIPT = "the batch script, or a process that it runs"
    STEP = "a task of a step, or a shell of an interactive one"
    SHELL = "a shell of salloc, or in a terminal that the batch script serves"


@dataclass(frozen=True)
class Process:
    """One of the processes above this one; `title` is its command line."""

    pid: int
    session: int
    title: str = ""


@dataclass(frozen=True)
class JobStep:
    """A step as Slurm's names have it: `step` is a number, or `batch`, `interactive` or `extern`.

    `job` may be a job's SLUID instead of its number.
    """

    job: str
    step: str

    def of_another_job(self, jobs: Collection[str]) -> bool:
        """Whether it is known to be of none of the jobs with these numbers."""
        return self.job.isdecimal() and self.job not in jobs


_STEP = r"(?P<step>batch|interactive|extern|\d+)"
_TITLE = re.compile(rf"slurmstepd: \[(?P<job>\w+)(?:\+\d+)?\.{_STEP}(?:\+\d+)?[] ]")
_GROUP = re.compile(rf"/(?P<job>[^/]+)/step_{_STEP}(?=[/+]|$)")

_SPECIAL = {-5: "batch", -6: "interactive", -4: "extern"}
"""Slurm's numbers of steps that are none of srun's, as signed 32-bit integers."""


def is_step(name: str) -> bool:
    """Whether a control group of this name is a step's."""
    return re.fullmatch(rf"step_{_STEP}(?:\+\d+)?", name) is not None


def step_of_group(path: str) -> JobStep | None:
    """The step to which a control group belongs, the innermost of a Slurm within another."""
    found = [*_GROUP.finditer(path)]
    return _named(found[-1]) if found else None


def place_in_job(environ: Mapping[str, str], cgroups: str, line: Sequence[Process]) -> JobPlace:
    """What a process is in its job, SLURM_JOB_ID.

    `cgroups` is its /proc/PID/cgroup, and `line` it and its ancestors, as far as they can be seen.
    The slurmstepd above it says which step it is in; where it does not, its control group does. In
    a container that hides both SLURM_STEP_ID has to do. A terminal that the batch script serves,
    such as Jupyter's, has a session of its own: people watch what they do there, and the job is not
    ours to signal or to requeue.
    """
    # In a heterogeneous job each component has a number of its own.
    jobs = {
        value for name, value in environ.items() if name.startswith(("SLURM_JOB_ID", "SLURM_JOBID"))
    }
    step = _step(environ, cgroups, line)
    if step is not None and step.of_another_job(jobs):
        return (
            JobPlace.SHELL
        )  # of salloc, called from there: SLURM_STEP_ID is that of the other job
    if step is not None and step.step != "batch":
        return JobPlace.STEP
    script = environ.get("SLURM_TASK_PID", "")
    sessions = [process.session for process in line if str(process.pid) == script]
    ours = bool(sessions) and sessions[0] == line[0].session
    return JobPlace.BATCH_SCRIPT if ours else JobPlace.SHELL


def find_place(environ: Mapping[str, str]) -> JobPlace:
    """What this process is in the job that `environ` is about."""
    try:
        cgroups = Path("/proc/self/cgroup").read_text()
    except OSError:
        cgroups = ""
    return place_in_job(environ, cgroups, [*_line(os.getpid())])


def _step(environ: Mapping[str, str], cgroups: str, line: Sequence[Process]) -> JobStep | None:
    """The step that a process is in, by the best witness; None if none says that there is one."""
    groups = filter(None, map(step_of_group, cgroups.splitlines()))
    titles = filter(None, (_TITLE.match(process.title) for process in line))
    by_title = next(map(_named, titles), None)
    if (found := by_title or next(groups, None)) is not None:
        return found  # the title has the job's number, the group perhaps its SLUID
    try:
        number = int(environ.get("SLURM_STEP_ID", ""))
    except ValueError:
        return None
    signed = number - (1 << 32) if number >= 1 << 31 else number
    return JobStep("", _SPECIAL.get(signed, str(signed)))


def _named(found: re.Match[str]) -> JobStep:
    return JobStep(found["job"].removeprefix("job_"), found["step"])


def _line(pid: int) -> Iterator[Process]:
    """A process and its ancestors, up to the first that is gone or hidden."""
    try:
        process: psutil.Process | None = psutil.Process(pid)
        while process is not None:
            yield Process(process.pid, os.getsid(process.pid), " ".join(process.cmdline()))
            process = process.parent()
    except (psutil.Error, OSError):
        return


_STARTTIME = 22 - 3
"""Where the field `starttime` of proc(5) is among those after the name, which may hold blanks."""


def process_began(proc: Path = Path("/proc")) -> float | None:
    """In seconds since the epoch, to a hundredth of a second; None where the system does not say.

    What a process was before an exec counts, such as the batch script of a job.
    """
    try:
        stat = (proc / "self" / "stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[_STARTTIME])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age if age >= 0 else None
