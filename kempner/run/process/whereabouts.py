"""Where a thread of a program stands: the line of the user's code, and the collective it waits in.

Read from its Python stack by another thread, once a second: it costs microseconds, and works while
the thread sits in native code.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

_OURS = str(Path(__file__).parents[2]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_WRAPPERS = ("wrapper", "wait", "_wait")


@dataclass(frozen=True)
class CodePlace:
    """A `line` of the user's code as FILE:LINE, and the `collective` that it waits in; empty if
    there is none."""

    line: str = ""
    collective: str = ""

    @property
    def words(self) -> str:
        """For a sentence: where it is."""
        where = f"at {self.line}" if self.line else "outside of your files"
        return f"in {self.collective} {where}" if self.collective else where


class Whereabouts:
    """Looks at the thread that made this."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._seen = 0
        self.moves = 0
        """How many looks found it elsewhere than the one before."""

    def look(self) -> CodePlace:
        """Where it stands now; counts a move."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return CodePlace()
        stack = list(_outwards(frame))
        seen = hash(tuple((id(frame.f_code), frame.f_lasti) for frame in stack))
        self.moves += seen != self._seen
        self._seen = seen
        return _place([(f.f_code.co_filename, f.f_code.co_name, f.f_lineno) for f in stack])


def place_of(trace: TracebackType | None) -> CodePlace:
    """Where an exception was raised."""
    stack = []
    while trace is not None:
        code = trace.tb_frame.f_code
        stack.append((code.co_filename, code.co_name, trace.tb_lineno))
        trace = trace.tb_next
    return _place(stack[::-1])


def _place(stack: list[tuple[str, str, int]]) -> CodePlace:
    """Of a stack of files, functions and lines, the innermost first."""
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


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
