"""This machine: the place of a process in its Slurm job, limits and memory, shell commands.

A variable alone does not say where a process is. SLURM_STEP_ID is inherited from the shell that
called sbatch if that was in a step, and from Slurm 26.05 on it stands in the batch script, too.
Control groups (v1 and v2): the kernel's admin-guide/cgroup-v2 ("Memory") and cgroup-v1/memory.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil


class JobPlace(Enum):
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
    `job` may be a job's SLUID instead of its number."""

    job: str
    step: str


_STEP = r"(?P<step>batch|interactive|extern|\d+)"
_TITLE = re.compile(rf"slurmstepd: \[(?P<job>\w+)(?:\+\d+)?\.{_STEP}(?:\+\d+)?[] ]")
_GROUP = re.compile(rf"/(?P<job>[^/]+)/step_{_STEP}(?=[/+]|$)")

_SPECIAL = {-5: "batch", -6: "interactive", -4: "extern"}
"""Slurm's numbers of steps that are none of srun's, as signed 32-bit integers."""


def is_step(name: str) -> bool:
    return re.fullmatch(rf"step_{_STEP}(?:\+\d+)?", name) is not None


def step_of_group(path: str) -> JobStep | None:
    """The step to which a control group belongs, the innermost of a Slurm within another."""
    found = [*_GROUP.finditer(path)]
    return _named(found[-1]) if found else None


def place_in_job(environ: Mapping[str, str], cgroups: str, line: Sequence[Process]) -> JobPlace:
    """What a process is in its job, SLURM_JOB_ID. `cgroups` is its /proc/PID/cgroup, and `line` it
    and its ancestors, as far as they can be seen. The slurmstepd above it says which step it is in;
    where it does not, its control group does. In a container that hides both SLURM_STEP_ID has to
    do. A terminal that the batch script serves, such as Jupyter's, has a session of its own: people
    watch what they do there, and the job is not ours to signal or to requeue."""
    # In a heterogeneous job each component has a number of its own.
    jobs = {
        value for name, value in environ.items() if name.startswith(("SLURM_JOB_ID", "SLURM_JOBID"))
    }
    step = _step(environ, cgroups, line)
    if step is not None and step.job.isdecimal() and step.job not in jobs:
        # Of salloc, called from there: SLURM_STEP_ID is that of the other job.
        return JobPlace.SHELL
    if step is not None and step.step != "batch":
        return JobPlace.STEP
    script = environ.get("SLURM_TASK_PID", "")
    sessions = [process.session for process in line if str(process.pid) == script]
    ours = bool(sessions) and sessions[0] == line[0].session
    return JobPlace.BATCH_SCRIPT if ours else JobPlace.SHELL


def find_place(environ: Mapping[str, str]) -> JobPlace:
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


def process_began(proc: Path = Path("/proc"), process: int | str = "self") -> float | None:
    """When a process, or what it was before an exec, began: seconds since the epoch, to a
    hundredth; None where the system does not say."""
    try:
        stat = (proc / str(process) / "stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[_STARTTIME])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age if age >= 0 else None


_UNLIMITED = 1 << 60
"""Bytes; v1 writes no limit as a number that no machine has."""


@dataclass(frozen=True)
class MemoryGroup:
    """A folder of the memory controller: of a Slurm job as a whole, or else the process's own."""

    path: Path

    def oom_kills(self) -> int:
        """Processes in it that the kernel has killed for want of memory. Raises `OSError`. In v2 a
        group counts for those below it, in v1 each for itself."""
        if (self.path / "memory.events").exists():
            return _entries(self.path / "memory.events")["oom_kill"]
        files = [*self.path.rglob("memory.oom_control")] if _is_job(self.path) else []
        kills = 0
        for file in files or [self.path / "memory.oom_control"]:
            with suppress(FileNotFoundError):  # the group of a step that has just ended
                kills += _entries(file).get("oom_kill", 0)
        return kills

    def limit(self) -> int | None:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (self.path / name).exists():
                text = (self.path / name).read_text().strip()
                return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None
        return None

    def used(self) -> int:
        """Bytes that it has and that cannot be taken back, as a cache could. Raises `OSError`."""
        stat = _entries(self.path / "memory.stat")
        return stat["total_rss"] if "total_rss" in stat else stat["anon"]


def memory_group(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> MemoryGroup | None:
    """The group of the process whose `/proc/PID/cgroup` is given; None if there is none to see."""
    for folder in _folders(groups.read_text(), root):
        # A container may see the whole path, and as its root what is mounted there.
        for path in (folder, root / "memory", root):
            if any((path / name).exists() for name in ("memory.events", "memory.oom_control")):
                return MemoryGroup(_of_job(path))
    return None


def _folders(groups: str, root: Path) -> Iterator[Path]:
    """Where the memory controller may be, by lines of the form `ID:CONTROLLERS:PATH`."""
    lines = [line.split(":", 2) for line in groups.splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/")
    for number, _, path in lines:
        if number == "0":
            yield root / path.lstrip("/")


def _of_job(path: Path) -> Path:
    """The group of the Slurm job above this one, or `path`. From Slurm 26.05 on it is named by the
    job's SLUID."""
    return next((each for each in (path, *path.parents) if _is_job(each)), path)


def _is_job(path: Path) -> bool:
    """Whether it is a job's: it has its name, or that of a step is below it."""
    name = path.name
    if name.startswith("job_") and name.removeprefix("job_").isdecimal():
        return True
    return any(is_step(each.name) for each in path.glob("step_*"))


def _entries(file: Path) -> dict[str, int]:
    return {key: int(number) for key, number in map(str.split, file.read_text().splitlines())}


MEMORY = 0.02
"""Share of a node's memory that must be free before ranks are there."""

ROOM = 32 * 2**20
"""Bytes that must be free for temporary files, and in /dev/shm, where NCCL's ranks of a node meet.
"""

OPEN_FILES = (256, 4)
"""Open files that a rank needs, and more for each rank of the world: rank 0 hears from every one,
in each group and as the host of their store."""

SKEW = 60.0
"""Seconds that a node's clock may differ: munge, by which Slurm knows its nodes, bears with 300."""

SHARED_WITHIN = 5.0
"""Seconds after which a file that another host has written is seen, on any file system that is
shared; network file systems remember for a while that a file was not there."""


def open_files_needed(ranks: int) -> int:
    least, each = OPEN_FILES
    return least + each * ranks


def clock_skew(time: float, during: tuple[float, float]) -> float:
    """Seconds by which a clock that showed `time` is ahead at least; 0 if it may be right. `during`
    is when it was asked and when it had answered, by our own clock."""
    start, end = during
    return max(0.0, time - end) + min(0.0, time - start)


def own_part(environ: Mapping[str, str], local_rank: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES should be for a rank among parts of GPUs (MIG); None to leave it. A
    CUDA process sees only the first part of those that it is shown, so each rank must be shown its
    own: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ ("CUDA device enumeration")."""
    shown = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if len(shown) < 2 or not all(device.startswith("MIG-") for device in shown):
        return None
    return shown[local_rank] if local_rank < len(shown) else None


_RESERVE = 256  # for connections, checkpoints and logs that come later


CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")


def leave_no_cores(pattern: Path = CORE_PATTERN) -> bool:
    """Have what this process starts leave no core in the folder that it runs in; whether that was
    to do. Where the machine collects them elsewhere (core(5)), they are left to it."""
    try:
        collected = pattern.read_text().startswith(("|", "/"))
    except OSError:  # not shown to this process: they may lie anywhere
        collected = False
    if not collected:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    return not collected


def raise_open_file_limit() -> None:
    """A connection per rank: the usual soft limit of 1,024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_MCL_CURRENT, _MCL_FUTURE = 1, 2  # sys/mman.h


def lock_memory() -> bool:
    """Keep all pages of this process in memory, so that none is read from a file again; whether
    that was possible. Where only a part may be locked (`ulimit -l`), what is there now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # With a limit, memory that is asked for later would be refused.
    later = _MCL_FUTURE if soft == resource.RLIM_INFINITY else 0
    return int(ctypes.CDLL(None).mlockall(_MCL_CURRENT | later)) == 0


def files_to_spare() -> int:
    """How many more files this process may open and keep open, with some left for all else; at
    least 1."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = soft - len(list(Path("/proc/self/fd").iterdir()))
    return max(1, free // 2, free - _RESERVE)


TOLD = 2000
"""Characters at the end of its output that are kept."""

_LAST_OUTPUT = 2.0
"""Seconds for the output of a command that was killed."""


@dataclass(frozen=True)
class ShellEnd:
    """How a command ended: its exit status (negative for a signal), None if it was killed because
    it took too long, and the end of its output."""

    status: int | None
    said: str

    @property
    def failure(self) -> str:
        if self.status == 0:
            return ""
        last = self.said.strip().splitlines()[-1:]
        words = f": {last[0]}" if last else ""
        if self.status is None:
            return f"it took too long{words}"
        by = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        return f"{by}{words}"


def run_shell(command: str, facts: Mapping[str, str], seconds: float) -> ShellEnd:
    """Run `command` in /bin/sh with `facts` added to the environment; after `seconds` its whole
    session is killed. Never raises: a command that cannot be started has failed."""
    try:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env={**os.environ, **facts},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return ShellEnd(127, str(error))
    try:
        said, _ = shell.communicate(timeout=seconds)
        return ShellEnd(shell.returncode, _end_of(said))
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        said, _ = shell.communicate(timeout=_LAST_OUTPUT)
    return ShellEnd(None, _end_of(said))


def _end_of(said: bytes) -> str:
    return said.decode(errors="replace")[-TOLD:]
