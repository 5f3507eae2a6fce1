"""Whether the processes of a rank do anything, as the kernel counts it from outside.

A program that says nothing of itself is judged by this alone: its ranks may download, compile,
wait for a lock or for each other, before the first step or after the last one.
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

from kempner.run.process.whereabouts import CodePlace, place_in

WORKS = 0.05
"""Share of a processor that processes use at least if they are at work. Ranks that wait for each
other in Gloo use 0.003 of one, those that poll torch's store 0.013."""

TRANSFERS = 65536.0
"""Bytes a second that processes at work read and write at least, if they use no processor."""

POLLS = 1.0
"""Times a second that a process wakes up at least that looks again and again whether it can go on.
A worker of a data loader does so five times less often, whatever its trainer does."""

STACK_WITHIN = 10.0
"""Seconds for a look at a stack, which another process takes."""


@dataclass(frozen=True)
class TreeUsage:
    """What a process and its descendants have used: CPU seconds, bytes read and written, and by
    process how often it has gone to sleep, and for how many seconds it has waited for a processor.
    `spun` are the CPU seconds of those that have a GPU, which may do nothing but wait for it."""

    cpu: float
    moved: int
    sleeps: Mapping[int, int]
    spun: float = 0.0
    waited: Mapping[int, float] = field(default_factory=dict)


def tree_usage(pid: int) -> TreeUsage | None:
    """Of the processes below `pid`, itself included; None if it is gone, or if what one of them
    uses may not be read, as another user's may not: it may be at work."""
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
    """Seconds in which the main thread of a process could have gone on but for want of a processor,
    as where a machine has too few; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def has_gpu(pid: int) -> bool:
    """Whether a process has opened a GPU of NVIDIA or AMD."""
    try:
        files = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
        return any(file.startswith(("/dev/nvidia", "/dev/kfd")) for file in files)
    except OSError:
        return False  # it has just ended, or closed one


def _tree(pid: int) -> list[psutil.Process]:
    """A process and all below it. Raises `psutil.Error`."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


@dataclass(frozen=True)
class Stillness:
    """For how many seconds a rank has not worked, and has not even looked whether it can go on; and
    where it stands, if that could be seen. `works` says that it was seen at work: where nothing
    could be seen it is neither that nor idle."""

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
        """What it is `seconds` later, by the usage at both ends, where processes at work use at
        least such a `share` of a processor. To wait for one counts as using it, but not of a
        process that polls: on a crowded machine it waits a little each time."""
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
    """Share of a processor that processes at work use at least: on a crowded machine half of what
    each that wants one gets."""
    return min(WORKS, 0.5 * processors / load) if load > 0 else WORKS


@dataclass
class ActivityWatch:
    """Looks at the ranks of one machine now and then. `clock` is in seconds."""

    clock: Callable[[], float]
    use: Callable[[int], TreeUsage | None] = tree_usage
    _at: float = 0.0
    _usage: dict[int, TreeUsage | None] = field(default_factory=dict)
    _found: dict[int, Stillness] = field(default_factory=dict)

    def look(self, pids: Mapping[int, int]) -> Mapping[int, Stillness]:
        """By rank, of the process of each that runs."""
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
    """Reads stacks of Python from outside, with py-spy (the extra `stacks`), where that may."""

    @cached_property
    def _command(self) -> str | None:
        beside = Path(sys.executable).with_name("py-spy")
        return str(beside) if beside.exists() else shutil.which("py-spy")

    def place(self, pid: int) -> CodePlace | None:
        """Where the main thread of a process stands, or of the first below it that is Python; None
        if that cannot be seen."""
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


def main_place(told: bytes, pid: int) -> CodePlace | None:
    """Where the main thread stands in what `py-spy dump --json` prints of a process; None if it
    prints no such thread."""
    try:
        threads: list[dict[str, Any]] = json.loads(told)
        frames = [
            (str(frame["filename"]), str(frame["name"]).rpartition(".")[2], int(frame["line"]))
            for thread in threads
            if thread["os_thread_id"] == pid
            for frame in thread["frames"]
        ]
    except (ValueError, KeyError, TypeError):
        return None
    return place_in(frames) if frames else None
