"""Progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kempner.run.output.console import can_rewrite, erase_line, say

PLAIN_EVERY = 5.0
"""Least seconds between plain lines, to keep log files short."""

SHORTEST_BAR = 10
"""Columns below which a bar is left out."""

REFRESHED = 4
"""Redraws of the bar per second."""

REMEMBERED = 200
"""Steps by which the remaining time is estimated."""

PAUSED = 600.0
"""Seconds between two steps after which earlier steps no longer count for the estimate."""


class Display:
    """Shows the progress of a run; this base class shows nothing, for ranks other than 0."""

    def step(self, step: int, loss: float, tokens_per_second: float) -> None: ...

    def say(self, sentence: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BarState:
    """What the bar shows: the last step, its loss, tokens per second, and seconds `left` if
    known."""

    step: int
    steps: int
    loss: float | None = None
    speed: float | None = None
    left: float | None = None

    def parts(self) -> tuple[str, str, str, str]:
        loss = "loss -" if self.loss is None else f"loss {self.loss:.4f}"
        speed = "- tokens/s" if self.speed is None else f"{self.speed:,.0f} tokens/s"
        left = "-:--:--" if self.left is None else describe_time(self.left)
        return f"step {self.step}/{self.steps}", loss, speed, f"ETA {left}"


@dataclass(frozen=True)
class BarRow:
    """A line: text, a bar of `bar` columns (0: none), text."""

    before: str
    bar: int
    after: str


def arrange(place: BarState, columns: int) -> BarRow:
    """The parts that fit into a line. If it is too short, first the bar is dropped, then the speed,
    the loss, and the remaining time."""
    step, loss, speed, left = place.parts()
    for words in ((f"{loss} {speed}", left), (loss, left), (left,), ()):
        after = " ".join(words)
        if len(step) + 1 + len(after) < columns:
            break
    bar = columns - 1 - len(step) - len(after) - 2
    return BarRow(step, bar if bar >= SHORTEST_BAR else 0, after)


def describe_time(seconds: float) -> str:
    """As "0:01:52", or from a day on "2 d 3 h"."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    return f"{days} d {hours} h" if days else f"{hours}:{minutes:02}:{whole % 60:02}"


class TimeLeft:
    """Estimates the remaining time by the last steps, since the first ones are slow."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seen: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)

    def left(self, step: int, now: float) -> float | None:
        """Seconds left after `step`, which ended at `now`; None if unknown. Steps before a pause or
        a rollback do not count."""
        if self._seen and (step <= self._seen[-1][1] or now - self._seen[-1][0] > PAUSED):
            self._seen.clear()
        self._seen.append((now, step))
        since, first = self._seen[0]
        if step >= self._steps:
            return 0.0
        return (now - since) / (step - first) * (self._steps - step) if step > first else None


class SteadyConsole(Console):
    """Never hides the cursor, since a killed process cannot show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Bar(Display):
    """One line at the bottom of a terminal: step, bar, loss, tokens per second, time left."""

    def __init__(self, done: int, steps: int) -> None:
        erase_line()
        self._place, self._pace = BarState(done, steps), TimeLeft(steps)
        self._console = SteadyConsole(highlight=False)
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=REFRESHED
        )
        self._live.start()

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        left = self._pace.left(step, time.monotonic())
        self._place = BarState(step, self._place.steps, loss, tokens_per_second, left)

    def say(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Table:
        place = self._place
        row = arrange(place, self._console.width)
        line = Table.grid(padding=(0, 1, 0, 0))
        cells: list[RenderableType] = [row.before]
        if row.bar:
            cells.append(ProgressBar(place.steps, place.step, width=row.bar))
        line.add_row(*cells, row.after)
        return line


class ProgressLines(Display):
    """A line every few seconds, for files and pipes."""

    def __init__(self, steps: int) -> None:
        self._steps, self._pace = steps, TimeLeft(steps)
        self._printed_at = float("-inf")

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        now = time.monotonic()
        left = self._pace.left(step, now)
        if now - self._printed_at < PLAIN_EVERY and step < self._steps:
            return
        self._printed_at = now
        self.say("  ".join(BarState(step, self._steps, loss, tokens_per_second, left).parts()))

    def say(self, sentence: str) -> None:
        say(sentence)


def open_display(rank: int, done: int, steps: int) -> Display:
    if rank != 0:
        return Display()
    return Bar(done, steps) if can_rewrite() else ProgressLines(steps)
