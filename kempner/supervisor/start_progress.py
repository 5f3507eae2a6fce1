"""What happens between the launch of the ranks and their first step, as the user sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil

from kempner.run.control.protocol import Phase
from kempner.run.output.console import (
    WholeLine,
    can_rewrite,
    erase_line,
    leave_line_to_others,
    show_for_now,
)
from kempner.run.output.units import count

_ON_THE_WAY = (Phase.START, Phase.RENDEZVOUS, Phase.LOAD)
"""The phases before the first step, in their order."""

_PROBE = 4
"""Bytes that Python's tempfile writes once to find out whether a folder takes them."""

_ANEW = 3
"""Lines that may be said below what a program of the user's own has written, before it trains."""

_LONGEST = 60
"""Seconds after which a program of the user's own is no longer said to start."""


def describe_start(size: int, phases: Collection[Phase], last_step: int | None) -> str:
    """What `size` ranks are about, as a line; empty once one of them trains.

    `phases` are those of the ranks that have connected, `last_step` the newest commit."""
    if any(phase not in _ON_THE_WAY for phase in phases):
        return ""
    ranks = count(size, "rank")
    if len(phases) < size:  # until a fork server, which imports torch for all, has done so
        return f"starting {ranks}: importing torch"
    match min(phases, key=_ON_THE_WAY.index):
        case Phase.START:
            return f"{ranks}: importing torch"
        case Phase.RENDEZVOUS:
            return f"{ranks}: meeting"
        case _:
            doing = "building the model" if last_step is None else f"loading step {last_step}"
            return f"{ranks}: {doing}"


def written_below() -> int | None:
    """Bytes that the processes below this one have written, to whatever; None: that is unknown."""
    total = 0
    try:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                total += max(0, process.io_counters().write_chars - _PROBE)
    except (psutil.Error, OSError):  # another user's, or no descriptor is free
        return None
    return total


class StartProgress:
    """One line on a terminal, with the seconds since the start, a few in a file; silent once
    training has begun.

    A program of the user's own may print what it likes: its line is made anew only as long as no
    process of its has written anything."""

    def __init__(
        self,
        size: int,
        last_step: int | None,
        ours: bool,
        now: Callable[[], float] = time.monotonic,
        written: Callable[[], int | None] = written_below,
    ) -> None:
        self._size, self._last_step, self._now, self._written = size, last_step, now, written
        self._shown, self._over, self._began = "", False, now()
        self._head, self._left = f"starting {count(size, 'rank')}", _ANEW
        self._seen, self._before = 0, 0  # bytes as the line was said, and at the last look
        self._whole_line = None if ours else WholeLine(self._head)
        if ours:
            self.update(())

    def update(self, phases: Collection[Phase]) -> None:
        if self._over:
            return
        if self._whole_line is not None:
            self._whole_line = self._say_whole(self._whole_line, phases)
            return
        line = describe_start(self._size, phases, self._last_step)
        if not line:
            self._over = True
            leave_line_to_others(True)  # rank 0 shows its own there
            return
        seconds = int(self._now() - self._began)
        if seconds and can_rewrite():
            line = f"{line}, {seconds} s"
        if line != self._shown:
            self._shown = line
            show_for_now(line)

    def _say_whole(self, line: WholeLine, phases: Collection[Phase]) -> WholeLine:
        """Say how a program of the user's own gets on: in the place of `line`, or below it where
        something may have been printed since."""
        head, seconds = self._head, int(self._now() - self._began)
        if len(phases) >= self._size:
            head = describe_start(self._size, phases, self._last_step)
        if not head or seconds > _LONGEST or not can_rewrite():
            self._over = True
            return line
        if (written := self._written()) is None:
            self._over = True
            return line
        text = f"{head}, {seconds} s"
        pauses, self._before = written == self._before, written
        if not seconds or text == self._shown:
            return line
        if written == self._seen:
            self._over = not line.say_anew(text)
        elif head != self._head or (pauses and self._left):
            self._left -= head == self._head
            line = WholeLine(text)
        else:  # it prints by itself
            return line
        self._head, self._seen, self._shown = head, written, text
        return line

    def close(self, clean: bool) -> None:
        """No rank is left; `clean` is whether rank 0 had the time to close its own line."""
        if self._whole_line is not None:
            return
        if not self._over:
            self._over = True
            erase_line()
        elif clean:
            leave_line_to_others(False)
