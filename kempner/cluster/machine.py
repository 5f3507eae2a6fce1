"""This machine: the place of a process in its Slurm job, limits and memory, shell commands.

Environment variables alone do not show where a process is: SLURM_STEP_ID is inherited from the
shell that called sbatch if that was in a step, and since Slurm 26.05 it is also set in the batch
script.
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
from collections import deque
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
    """This process or one of its ancestors; `title` is its command line."""

    pid: int
    session: int
    title: str = ""


@dataclass(frozen=True)
class JobStep:
    """A step: `step` is a number, or `batch`, `interactive` or `extern`. `job` may be the job's
    SLUID instead of its number."""

    job: str
    step: str


_STEP = r"(?P<step>batch|interactive|extern|\d+)"
_TITLE = re.compile(rf"slurmstepd: \[(?P<job>\w+)(?:\+\d+)?\.{_STEP}(?:\+\d+)?[] ]")
_GROUP = re.compile(rf"/(?P<job>[^/]+)/step_{_STEP}(?=[/+]|$)")

_SPECIAL = {-5: "batch", -6: "interactive", -4: "extern"}
"""Slurm's numbers of the steps that srun does not start, as signed 32-bit integers."""


def is_step(name: str) -> bool:
    return re.fullmatch(rf"step_{_STEP}(?:\+\d+)?", name) is not None


def step_of_group(path: str) -> JobStep | None:
    """The step of a control group's path; the innermost one if there is a Slurm within another."""
    found = [*_GROUP.finditer(path)]
    return _named(found[-1]) if found else None


def place_in_job(environ: Mapping[str, str], cgroups: str, line: Sequence[Process]) -> JobPlace:
    """The place of a process in its job (SLURM_JOB_ID). `cgroups` is its /proc/PID/cgroup, `line`
    are the process and its visible ancestors. The slurmstepd among them shows the step, or else the
    control group; in a container that hides both, SLURM_STEP_ID. A terminal that the batch script
    serves, such as Jupyter's, has its own session and counts as a shell: a user watches it, and the
    job is not kempner's to signal or requeue."""
    # In a heterogeneous job each component has its own number.
    jobs = {
        value for name, value in environ.items() if name.startswith(("SLURM_JOB_ID", "SLURM_JOBID"))
    }
    step = _step(environ, cgroups, line)
    if step is not None and step.job.isdecimal() and step.job not in jobs:
        # A shell of salloc that was called in a step of another job.
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
    """The step of a process, from the best source that shows one; None if none does."""
    groups = filter(None, map(step_of_group, cgroups.splitlines()))
    titles = filter(None, (_TITLE.match(process.title) for process in line))
    by_title = next(map(_named, titles), None)
    if (found := by_title or next(groups, None)) is not None:
        return found  # the title has the job's number, the group perhaps only its SLUID
    try:
        number = int(environ.get("SLURM_STEP_ID", ""))
    except ValueError:
        return None
    signed = number - (1 << 32) if number >= 1 << 31 else number
    return JobStep("", _SPECIAL.get(signed, str(signed)))


def _named(found: re.Match[str]) -> JobStep:
    return JobStep(found["job"].removeprefix("job_"), found["step"])


def _line(pid: int) -> Iterator[Process]:
    """A process and its ancestors, up to the first one that is gone or hidden."""
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
"""Bytes from which a limit means none; v1 writes a huge number."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a memory controller: that of the Slurm job, or else the process's
    own."""

    path: Path

    def oom_kills(self) -> int:
        """The number of processes in it that the kernel has killed for lack of memory. In v2 a
        group's counter includes its descendants, in v1 it does not. Raises `OSError`."""
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
        """Bytes in use that cannot be reclaimed, as a cache could. Raises `OSError`."""
        stat = _entries(self.path / "memory.stat")
        return stat["total_rss"] if "total_rss" in stat else stat["anon"]


KILLED_WITHIN = 30.0
"""Seconds from an out-of-memory kill to the end that it explains: a large process is not gone at
once."""


class OutOfMemoryKills:
    """Tells from a count of out-of-memory kills, noted again and again, whether one was recent."""

    def __init__(self, count: int, now: float) -> None:
        self._noted = deque([(now, count)])

    @property
    def noted_at(self) -> float:
        return self._noted[-1][0]

    def note(self, count: int, now: float) -> None:
        self._noted.append((now, count))
        while len(self._noted) > 1 and self._noted[1][0] <= now - KILLED_WITHIN:
            self._noted.popleft()

    def recent(self, count: int) -> bool:
        """Whether there was one in the last `KILLED_WITHIN` seconds, if `count` is the number
        now."""
        return count > self._noted[0][1]


def memory_group(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> MemoryGroup | None:
    """The memory group of the process whose `/proc/PID/cgroup` is given; None if none is
    visible."""
    for folder in _folders(groups.read_text(), root):
        # A container may show the host's path but have its own group mounted as the root.
        for path in (folder, root / "memory", root):
            if any((path / name).exists() for name in ("memory.events", "memory.oom_control")):
                return MemoryGroup(_of_job(path))
    return None


def _folders(groups: str, root: Path) -> Iterator[Path]:
    """The possible folders of the memory controller, from lines of the form
    `ID:CONTROLLERS:PATH`."""
    lines = [line.split(":", 2) for line in groups.splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/")
    for number, _, path in lines:
        if number == "0":
            yield root / path.lstrip("/")


def _of_job(path: Path) -> Path:
    """The group of the Slurm job above `path`, or `path`. Since Slurm 26.05 it is named by the
    job's SLUID."""
    return next((each for each in (path, *path.parents) if _is_job(each)), path)


def _is_job(path: Path) -> bool:
    """Whether it is the group of a job: by its name, or because it contains that of a step."""
    name = path.name
    if name.startswith("job_") and name.removeprefix("job_").isdecimal():
        return True
    return any(is_step(each.name) for each in path.glob("step_*"))


def _entries(file: Path) -> dict[str, int]:
    return {key: int(number) for key, number in map(str.split, file.read_text().splitlines())}


MEMORY = 0.02
"""Share of a node's memory that must be free before ranks start."""

ROOM = 32 * 2**20
"""Bytes that must be free for temporary files, and in /dev/shm, which NCCL uses within a node."""

OPEN_FILES = (256, 4)
"""Open files that a rank needs, and more per rank of the world: rank 0 has connections to all
ranks, in each group and as the host of their store."""

SKEW = 60.0
"""Seconds by which a node's clock may differ; munge, with which Slurm authenticates, allows 300."""

SHARED_WITHIN = 5.0
"""Seconds after which a file that another host has written is visible on any shared file system;
network file systems cache for a while that a file does not exist."""


def open_files_needed(ranks: int) -> int:
    least, each = OPEN_FILES
    return least + each * ranks


def clock_skew(time: float, during: tuple[float, float]) -> float:
    """The least number of seconds by which a clock that showed `time` is ahead (negative: behind);
    0 if it may be right. `during` are the times of question and answer by this host's clock."""
    start, end = during
    return max(0.0, time - end) + min(0.0, time - start)


def own_part(environ: Mapping[str, str], local_rank: int) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES for a rank if the GPUs are split by MIG; None to leave it.
    A CUDA process uses only the first MIG device that it sees, so each rank must see only its own:
    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ ("CUDA device enumeration")."""
    shown = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if len(shown) < 2 or not all(device.startswith("MIG-") for device in shown):
        return None
    return shown[local_rank] if local_rank < len(shown) else None


_RESERVE = 256  # for connections, checkpoints and logs that come later


CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")


def leave_no_cores(pattern: Path = CORE_PATTERN) -> bool:
    """Disable core dumps into the working directory, for processes that this one starts; whether
    that was needed. If the machine collects them elsewhere (core(5)), they stay enabled."""
    try:
        collected = pattern.read_text().startswith(("|", "/"))
    except OSError:  # not readable, so cores may go anywhere
        collected = False
    if not collected:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    return not collected


def raise_open_file_limit() -> None:
    """Raise the soft limit to the hard one: with a connection per rank the usual 1,024 is soon
    reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_MCL_CURRENT, _MCL_FUTURE = 1, 2  # sys/mman.h


def lock_memory() -> bool:
    """Lock this process's pages in memory, so that none is read from a file again; whether that was
    possible. With a limit (`ulimit -l`) only the present pages."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # With a limit, later allocations would fail.
    later = _MCL_FUTURE if soft == resource.RLIM_INFINITY else 0
    return int(ctypes.CDLL(None).mlockall(_MCL_CURRENT | later)) == 0


def files_to_spare() -> int:
    """The number of files that this process may additionally keep open, with some in reserve; at
    least 1."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = soft - len(list(Path("/proc/self/fd").iterdir()))
    return max(1, free // 2, free - _RESERVE)


OUTPUT_KEPT = 2000
"""Characters at the end of a command's output that are kept."""

_LAST_OUTPUT = 2.0
"""Seconds to read the output of a command that was killed."""


@dataclass(frozen=True)
class ShellEnd:
    """A command's exit status (negative for a signal; None after a timeout), and the end of its
    output."""

    status: int | None
    output: str

    @property
    def failure(self) -> str:
        if self.status == 0:
            return ""
        last = self.output.strip().splitlines()[-1:]
        words = f": {last[0]}" if last else ""
        if self.status is None:
            return f"it took too long{words}"
        by = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        return f"{by}{words}"


def run_shell(command: str, facts: Mapping[str, str], seconds: float) -> ShellEnd:
    """Run `command` in /bin/sh with `facts` added to the environment; kill its whole session after
    `seconds`. Never raises: a command that cannot be started counts as failed."""
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
        output, _ = shell.communicate(timeout=seconds)
        return ShellEnd(shell.returncode, _end_of(output))
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        output, _ = shell.communicate(timeout=_LAST_OUTPUT)
    return ShellEnd(None, _end_of(output))


def _end_of(output: bytes) -> str:
    return output.decode(errors="replace")[-OUTPUT_KEPT:]
