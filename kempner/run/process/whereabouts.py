"""Where a thread of a program is: the line of the user's code, and the collective it waits in.

Another thread reads this from the Python stack once a second, which costs microseconds and works
while the thread is in native code. Whether it makes progress there shows in its CPU time, and in
what the process reads and writes. Standard library only.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeAlias

_OURS = str(Path(__file__).parents[2]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_BACKWARD = f"{os.sep}torch{os.sep}autograd{os.sep}"
_WRAPPERS = ("wrapper", "wait", "_wait")
_THREADING = f"{os.sep}threading.py"
CodeStack: TypeAlias = Sequence[tuple[str, str, int]]
"""Files, functions and lines, innermost first."""

BUSY = 0.25
"""Seconds of CPU time, or of waiting for a CPU, between two looks a second apart that show that a
thread computes. Its position in Python may be the same at each look: it releases the GIL only at
certain instructions."""

TRANSFERS = 1 << 18
"""Bytes read and written between two looks that show that native code loads a file."""

WAKES = 3
"""Wake-ups between two looks that show that a thread receives data over a network bit by bit:
neither its CPU time nor the process's bytes show that."""


@dataclass(frozen=True)
class CodePlace:
    """A `line` of the user's code as FILE:LINE, and the `collective` that it waits in; each may be
    empty."""

    line: str = ""
    collective: str = ""

    @property
    def words(self) -> str:
        where = f"at {self.line}" if self.line else "outside of your files"
        return f"in {self.collective} {where}" if self.collective else where


class Whereabouts:
    """Observes the thread that created this object."""

    def __init__(self) -> None:
        self.thread, self._number = threading.get_ident(), threading.get_native_id()
        self._seen = 0
        self._cpu, self._io, self._woken = 0.0, 0, 0
        self.in_backward = False
        """Whether it was in a backward pass at the last look; other threads begin its
        collectives."""
        self.moves = 0
        """Number of looks that found the thread elsewhere than before, or at work in native
        code."""

    def look(self) -> CodePlace:
        frames = sys._current_frames()
        frame = frames.get(self.thread)
        if frame is None:
            return CodePlace()
        stack = list(_outwards(frame))
        seen = hash(tuple((id(frame.f_code), frame.f_lasti) for frame in stack))
        self.in_backward = _BACKWARD in frame.f_code.co_filename
        place = place_of_main(_described(frame), _others(frames))
        works = self._works_natively() and not place.collective
        self.moves += works or seen != self._seen
        self._seen = seen
        return place

    def _works_natively(self) -> bool:
        """Whether the thread has used a CPU or woken up, or the process has moved bytes, since the
        last look. False where CUDA is in use: a thread that waits for a GPU spins."""
        cpu, io = self._processor_time(), _bytes_moved()
        woken = _woken(self._number)
        works = cpu - self._cpu > BUSY or io - self._io > TRANSFERS or woken - self._woken >= WAKES
        self._cpu, self._io, self._woken = cpu, io, woken
        # Another thread may be importing it: then it cannot be in use yet.
        in_use = getattr(sys.modules.get("torch.cuda"), "is_initialized", bool)
        return works and not in_use()

    def _processor_time(self) -> float:
        """Seconds in which the thread had a CPU or waited for one."""
        try:
            times = Path(f"/proc/self/task/{self._number}/schedstat").read_text().split()
            return (int(times[0]) + int(times[1])) / 1e9
        except (OSError, ValueError, IndexError):
            return time.clock_gettime(time.pthread_getcpuclockid(self.thread))


def place_of(trace: TracebackType | None) -> CodePlace:
    """Where an exception was raised."""
    stack = []
    while trace is not None:
        code = trace.tb_frame.f_code
        stack.append((code.co_filename, code.co_name, trace.tb_lineno))
        trace = trace.tb_next
    return place_in(stack[::-1])


def place_of_main(main: CodeStack, others: Iterable[CodeStack]) -> CodePlace:
    """The place of the main thread; if it waits for `others` at the exit of Python, that of the
    first of these in the user's code."""
    place = place_in(main)
    joins = any(name == "_shutdown" and file.endswith(_THREADING) for file, name, _ in main)
    if place == CodePlace() and joins:
        return next((at for stack in others if (at := place_in(stack)).line), place)
    return place


def place_in(stack: CodeStack) -> CodePlace:
    line = next((f"{Path(file).name}:{at}" for file, _, at in stack if _is_of_user(file)), "")
    collective = ""
    for file, name, _ in stack:
        if _is_of_user(file):
            break
        if _DISTRIBUTED in file and name not in _WRAPPERS:
            collective = name
    return CodePlace(line, collective)


def _is_of_user(file: str) -> bool:
    installed = any(folder in file for folder in _INSTALLED)
    return not (installed or file.startswith(("<", _OURS, _STANDARD)))


def _woken(thread: int) -> int:
    """How often a thread of this process has woken up (proc(5)); 0 if unknown."""
    try:
        lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt")), 0)


def _bytes_moved() -> int:
    """Bytes that this process has read and written so far (proc(5)); 0 if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counted = ("rchar", "wchar", "read_bytes")  # the last: pages of mapped files, too
    return sum(int(line.split()[1]) for line in lines if line.startswith(counted))


def _described(frame: FrameType | None) -> CodeStack:
    return [(f.f_code.co_filename, f.f_code.co_name, f.f_lineno) for f in _outwards(frame)]


def _others(frames: Mapping[int, FrameType]) -> Iterator[CodeStack]:
    """The stacks of the threads that Python waits for at exit."""
    for thread in threading.enumerate():
        frame = None if thread.daemon else frames.get(thread.ident or 0)
        if frame is not None:
            yield _described(frame)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def thread_states(pid: int | str, proc: Path = Path("/proc"), name: str = "") -> list[str]:
    """The states (proc(5), such as `D`) of all threads whose names begin with `name`; empty if the
    process is gone. `pid` may be "self"."""
    states = []
    for thread in proc.glob(f"{pid}/task/*/stat"):
        with suppress(OSError):  # it has just ended
            before, _, after = thread.read_text().rpartition(") ")
            if before.partition("(")[2].startswith(name):
                states.append(after[:1])
    return states


def start_ticks(pid: int | str, proc: Path = Path("/proc"), zombies: bool = False) -> int | None:
    """The start time of a process in clock ticks since boot (proc(5), field 22); None if it has
    ended, and so has a zombie unless `zombies` count: a thread of it may be stuck in the kernel."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" and not zombies else int(fields[18])
