"""Progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kempner.run.output.console import say

PLAIN_EVERY = 5.0
"""Seconds between plain lines: a log file should tell the story, not every word of it."""


class Display(Protocol):
    """Where progress is shown."""

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A step is done."""

    def say(self, sentence: str) -> None:
        """Something worth a line of its own."""

    def close(self) -> None:
        """Nothing more will come."""


class NoDisplay:
    """For all ranks but the first."""

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show nothing."""

    def say(self, sentence: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to close."""


class Bar:
    """A progress bar with loss, tokens per second and the time to go."""

    def __init__(self, done: int, steps: int) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(),
        )
        self._task = self._progress.add_task("", total=steps, completed=done, loss="-", speed="-")
        self._progress.start()

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Move the bar."""
        speed = f"{tokens_per_second:,.0f}"
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}", speed=speed)

    def say(self, sentence: str) -> None:
        """Print above the bar."""
        self._progress.console.print(sentence, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


class Lines:
    """A line every few seconds, for files and pipes."""

    def __init__(self, done: int, steps: int) -> None:
        self._steps, self._started, self._done = steps, time.monotonic(), done
        self._printed_at = float("-inf")

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Print, unless a line was printed a moment ago."""
        now = time.monotonic()
        if now - self._printed_at < PLAIN_EVERY and step < self._steps:
            return
        self._printed_at = now
        left = (now - self._started) / (step - self._done) * (self._steps - step)
        eta = f"{int(left) // 60}:{int(left) % 60:02d}"
        self.say(
            f"step {step}/{self._steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  "
            f"ETA {eta}"
        )

    def say(self, sentence: str) -> None:
        """Print."""
        say(sentence)

    def close(self) -> None:
        """Nothing to close."""


def open_display(rank: int, done: int, steps: int) -> Display:
    """What suits this rank and where its output goes."""
    if rank != 0:
        return NoDisplay()
    return Bar(done, steps) if sys.stdout.isatty() else Lines(done, steps)
