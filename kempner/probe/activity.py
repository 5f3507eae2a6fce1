"""The activity of a rank's processes as observed from outside: CPU time, I/O, sleeps, stacks.

A program that does not report is judged by this alone: its ranks may download, compile, or wait
for a lock or for each other, before the first step or after the last one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from kempner.run.process.whereabouts import CodePlace, place_of_main

WORKS = 0.05
"""Share of a CPU that processes at work use at least. Ranks that wait for each other in Gloo use
0.003, those that poll torch's store 0.013."""

TRANSFERS = 65536.0
"""Bytes a second that processes at work read and write at least, if they use no CPU."""

POLLS = 1.0
"""Wake-ups a second of a process that polls, at least. A worker of a data loader wakes up five
times less often, whatever its trainer does."""

STACK_WITHIN = 10.0
"""Seconds in which py-spy must return a stack."""


@dataclass(frozen=True)
class TreeUsage:
    """Use by a process and its descendants: CPU seconds, bytes read and written, and by process the
    number of sleeps and the seconds of waiting for a CPU. `spun` are the CPU seconds of processes
    that have a GPU, which may only spin while they wait for it."""

    cpu: float
    moved: int
    sleeps: Mapping[int, int]
    spun: float = 0.0
    waited: Mapping[int, float] = field(default_factory=dict)


def tree_usage(pid: int) -> TreeUsage | None:
    """Use by `pid` and its descendants; None if it is gone, or if one of them may not be read,
    since it may be at work."""
    cpu, spun, moved, sleeps, waited = 0.0, 0.0, 0, dict[int, int](), dict[int, float]()
    try:
        for process in _tree(pid):
            with suppress(psutil.NoSuchProcess), process.oneshot():  # it has just ended
                times, counted = process.cpu_times(), process.io_counters()
                used = times.user + times.system + times.children_user + times.children_system
                cpu += used
                spun += used if has_gpu(process.pid) else 0.0
                # Pages of mapped files, and those that were swapped out, are no calls of read.
                moved += counted.read_chars + counted.write_chars + counted.read_bytes
                sleeps[process.pid] = process.num_ctx_switches().voluntary
                waited[process.pid] = _waited_for_processor(process.pid)
    except psutil.Error:
        return None
    return TreeUsage(cpu, moved, sleeps, spun, waited) if sleeps else None


def _waited_for_processor(pid: int) -> float:
    """Seconds for which the main thread of a process was runnable and waited for a CPU; 0 if
    unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def has_gpu(pid: int) -> bool:
    """Whether a process has opened an NVIDIA or AMD GPU."""
    try:
        files = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
        return any(file.startswith(("/dev/nvidia", "/dev/kfd")) for file in files)
    except OSError:
        return False  # it has just ended, or closed one


def _tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants. Raises `psutil.Error`."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


@dataclass(frozen=True)
class Stillness:
    """Seconds for which a rank has been `idle`, and for which it has been `still`, which is to say
    without polling either; and its `place` in the program, if known. `works`: it was seen at work;
    a rank that could not be observed neither works nor is idle."""

    idle: float = 0.0
    still: float = 0.0
    place: CodePlace | None = None
    works: bool = False

    def after(
        self,
        before: TreeUsage | None,
        now: TreeUsage | None,
        seconds: float,
        share: float = WORKS,
    ) -> Stillness:
        """The stillness `seconds` later, by the usage `before` and `now`; processes at work use at
        least `share` of a CPU. Time spent waiting for a CPU counts as use, except for a process
        that polls: on an overloaded machine it waits a little each time."""
        if before is None or now is None:
            return Stillness()
        moves = now.moved - before.moved > TRANSFERS * seconds
        if before.sleeps.keys() != now.sleeps.keys():
            return Stillness(works=True)
        woken = {pid: now.sleeps[pid] - before.sleeps[pid] for pid in now.sleeps}
        cpu, spun = now.cpu - before.cpu, now.spun - before.spun
        cpu += sum(
            waited - before.waited[pid]
            for pid, waited in now.waited.items()
            if woken[pid] <= POLLS * seconds
        )
        if cpu > share * seconds or moves:
            return Stillness(works=moves or cpu - spun > share * seconds)
        still = 0.0 if max(woken.values()) > POLLS * seconds else self.still + seconds
        return Stillness(self.idle + seconds, still)


def share_at_work(processors: int, load: float) -> float:
    """Share of a CPU that processes at work use at least: on an overloaded machine half of an equal
    share."""
    return min(WORKS, 0.5 * processors / load) if load > 0 else WORKS


@dataclass
class ActivityWatch:
    """Observes the ranks of one machine at intervals. `clock` is in seconds."""

    clock: Callable[[], float]
    use: Callable[[int], TreeUsage | None] = tree_usage
    _at: float = 0.0
    _usage: dict[int, TreeUsage | None] = field(default_factory=dict)
    _found: dict[int, Stillness] = field(default_factory=dict)

    def look(self, pids: Mapping[int, int]) -> Mapping[int, Stillness]:
        """The stillness of each rank, by the pid of its process."""
        now, usage = self.clock(), {rank: self.use(pid) for rank, pid in pids.items()}
        share = share_at_work(os.cpu_count() or 1, os.getloadavg()[0])
        self._found = {
            rank: self._found.get(rank, Stillness()).after(
                self._usage.get(rank), used, now - self._at, share
            )
            for rank, used in usage.items()
        }
        self._at, self._usage = now, usage
        return self._found


class StackReader:
    """Reads Python stacks of other processes with py-spy (the extra `stacks`), where permitted."""

    @cached_property
    def _command(self) -> str | None:
        beside = Path(sys.executable).with_name("py-spy")
        return str(beside) if beside.exists() else shutil.which("py-spy")

    def place(self, pid: int) -> CodePlace | None:
        """The place of the main thread of a process, or of its first descendant that runs Python;
        None if unknown."""
        if self._command is None:
            return None
        try:
            tree = _tree(pid)
        except psutil.Error:
            return None
        return next(filter(None, (self._place(self._command, one.pid) for one in tree)), None)

    def _place(self, py_spy: str, pid: int) -> CodePlace | None:
        command = [py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        try:
            seen = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=STACK_WITHIN
            )
            return main_place(seen.stdout, pid)
        except (OSError, subprocess.TimeoutExpired):
            return None


def main_place(dump: bytes, pid: int) -> CodePlace | None:
    """The place of the main thread in the output of `py-spy dump --json`; None if it has no such
    thread."""
    try:
        threads: list[dict[str, Any]] = json.loads(dump)
        stacks = {
            int(thread["os_thread_id"]): [
                (str(frame["filename"]), str(frame["name"]).rpartition(".")[2], int(frame["line"]))
                for frame in thread["frames"]
            ]
            for thread in threads
        }
    except (ValueError, KeyError, TypeError):
        return None
    main = stacks.pop(pid, None)
    return place_of_main(main, stacks.values()) if main else None
