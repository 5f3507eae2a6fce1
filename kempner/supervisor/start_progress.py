"""Shows the user what happens between the launch of the ranks and their first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from kempner.run.control.protocol import Phase
from kempner.run.output.console import (
    can_rewrite,
    erase_line,
    leave_line_to_others,
    say,
    show_for_now,
)
from kempner.run.output.units import count

_ON_THE_WAY = (Phase.START, Phase.RENDEZVOUS, Phase.LOAD)
"""The phases before the first step, in their order."""


def describe_start(size: int, phases: Collection[Phase], last_step: int | None) -> str:
    """What `size` ranks are about, as a line; empty once one of them trains.

    `phases` are those of the ranks that have connected, `last_step` the newest commit.
    """
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


class StartProgress:
    """One line on a terminal, with the seconds since the start, a few in a file; silent once
    training has begun.

    Of a program of the user's own, which prints its own progress, only the start is shown.
    """

    def __init__(
        self,
        size: int,
        last_step: int | None,
        ours: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size, self._last_step, self._now = size, last_step, now
        self._shown, self._over, self._began = "", not ours, now()
        if ours:
            self.update(())
        else:
            say(f"starting {count(size, 'rank')}")

    def update(self, phases: Collection[Phase]) -> None:
        """Show where the ranks are that have connected, if that is news."""
        if self._over:
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

    def close(self, clean: bool) -> None:
        """No rank is left; `clean` is whether rank 0 had the time to close its own line."""
        if not self._over:
            self._over = True
            erase_line()
        elif clean:
            leave_line_to_others(False)
