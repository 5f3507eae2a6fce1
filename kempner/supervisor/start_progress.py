"""What happens between the launch of the ranks and their first step, for whoever watches."""

from __future__ import annotations

from collections.abc import Collection

from kempner.run.control.protocol import Phase
from kempner.run.output.console import erase_line, leave_line_to_others, say, show_for_now
from kempner.run.output.words import counted

_ON_THE_WAY = (Phase.START, Phase.RENDEZVOUS, Phase.LOAD)
"""The phases before the first step, in their order."""


def describe_start(size: int, phases: Collection[Phase], last_step: int | None) -> str:
    """What `size` ranks are about, as a line; empty once one of them trains.

    `phases` are those of the ranks that have connected, `last_step` the newest commit.
    """
    if any(phase not in _ON_THE_WAY for phase in phases):
        return ""
    ranks = counted(size, "rank")
    if len(phases) < size:
        return f"starting {ranks}"
    match min(phases, key=_ON_THE_WAY.index):
        case Phase.START:
            return f"{ranks}: importing torch"
        case Phase.RENDEZVOUS:
            return f"{ranks}: meeting"
        case _:
            doing = "building the model" if last_step is None else f"loading step {last_step}"
            return f"{ranks}: {doing}"


class StartProgress:
    """One line on a terminal, a few in a file; silent once training has begun.

    Of a program of the user's own, which prints what it likes, nothing but its start is told.
    """

    def __init__(self, size: int, last_step: int | None, ours: bool) -> None:
        self._size, self._last_step = size, last_step
        self._shown, self._over = "", not ours
        if ours:
            self.update(())
        else:
            say(describe_start(size, (), None))

    def update(self, phases: Collection[Phase]) -> None:
        """Show where the ranks are that have connected, if that is news."""
        if self._over:
            return
        line = describe_start(self._size, phases, self._last_step)
        if not line:
            self._over = True
            leave_line_to_others(True)  # rank 0 shows its own there
        elif line != self._shown:
            self._shown = line
            show_for_now(line)

    def close(self, clean: bool) -> None:
        """No rank is left; `clean` is whether rank 0 had the time to close its own line."""
        if not self._over:
            self._over = True
            erase_line()
        elif clean:
            leave_line_to_others(False)
