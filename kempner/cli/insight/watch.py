"""`kempner status --watch`: a view that stays up to date until Ctrl-C."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from kempner.cli.insight.status_view import panel, table
from kempner.cli.insight.status_words import line
from kempner.insight.report.page.words import duration
from kempner.insight.status.summary import Status
from kempner.run.process.exit_codes import RunError
from kempner.run.process.helper_thread import keep_running

EVERY = 2.0
"""Seconds between two looks: as often as a supervisor says where its ranks are."""

OLD_AFTER = 10.0
"""Seconds without an answer of the file system after which the view says how old it is."""

Found: TypeAlias = Sequence[tuple[str, Status]]


@dataclass(frozen=True)
class Look:
    """What was read last, at `at` (`time.monotonic`, seconds), and what went wrong since."""

    found: Found = ()
    at: float = 0.0
    error: RunError | None = None


class Watcher:
    """Reads in a thread: storage that hangs must hold up neither the view nor Ctrl-C."""

    def __init__(self, read: Callable[[], Found]) -> None:
        self._read, self._new = read, threading.Event()
        self.last = Look(at=time.monotonic())
        keep_running("status", self._follow)

    def wait(self, seconds: float) -> bool:
        """Wait for the next look; whether there was one within so many seconds."""
        there = self._new.wait(seconds)
        self._new.clear()
        return there

    def _follow(self) -> None:
        while True:
            try:
                self.last = Look(self._read(), time.monotonic())
            except RunError as error:
                self.last = replace(self.last, error=error)
            self._new.set()
            time.sleep(EVERY)


class View:
    """What a watcher saw last, drawn for the terminal as it is at this moment.

    What a low terminal has no room for is left out: `whole` is whether it is drawn all the same.
    """

    def __init__(self, watcher: Watcher, *, together: bool, whole: bool = False) -> None:
        self._watcher, self._together, self._whole = watcher, together, whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        last, columns = self._watcher.last, options.max_width
        note = _age(last) or ("" if self._whole else "Ctrl-C leaves")
        found = [(name, _as_of_now(status, last)) for name, status in last.found]
        if not found:
            yield Text(str(last.error or "reading ..."), style="dim")
        elif self._together:
            yield table(found, columns, note)
        else:
            rows = None if self._whole else console.height
            yield from (_fitting(console, *one, columns, note, rows) for one in found)


def _fitting(
    console: Console, name: str, status: Status, columns: int, note: str, rows: int | None
) -> RenderableType:
    """As much of a run as has room in so many rows."""
    for lists in (2, 1, 0):
        drawn = panel(name, status, columns, note, lists)
        if rows is None or len(console.render_lines(drawn)) <= rows:
            break
    return drawn


def _as_of_now(status: Status, last: Look) -> Status:
    """Its durations counted on, with what has gone wrong since it was read."""
    wrong = () if last.error is None else (str(last.error),)
    return status.later(time.monotonic() - last.at, *wrong)


def _age(last: Look) -> str:
    """How old the view is, if it should be newer."""
    passed = time.monotonic() - last.at
    old = last.error is not None or passed > OLD_AFTER
    return f"{duration(round(passed))} old" if old else ""


def show_until_ctrl_c(read: Callable[[], Found], *, together: bool) -> None:
    """Show what `read` finds, again and again; as plain lines where nothing can be redrawn.

    There it ends when the runs do. Raises `RunError` if even the first look fails.
    """
    first = read()
    watcher = Watcher(read)
    watcher.last = Look(first, time.monotonic())
    console = Console(highlight=False)
    try:
        if console.is_terminal and not console.is_dumb_terminal:
            _draw(watcher, console, together=together)
        else:
            print_lines(watcher)
    except KeyboardInterrupt:
        return


def _draw(watcher: Watcher, console: Console, *, together: bool) -> None:
    shown = View(watcher, together=together)
    try:
        with Live(shown, console=console, screen=True, refresh_per_second=2):
            while True:  # the view is drawn by a thread: also when the terminal changes its size
                watcher.wait(3600.0)
    finally:  # what was seen last stays, as the screen goes back
        console.print(View(watcher, together=together, whole=True))


def print_lines(watcher: Watcher) -> None:
    """A line for each run as often as it changes, until all are over."""
    told: dict[str, str] = {}
    complaint = ""
    while True:
        last = watcher.last
        for name, status in last.found:
            text = line(name or "no run yet", status)
            if told.get(name) != text:
                told[name] = text
                typer.echo(f"{time.strftime('%H:%M:%S')}  {text}")
        sentence = "" if last.error is None else str(last.error)
        if sentence != complaint:
            complaint = sentence
            typer.echo(f"{time.strftime('%H:%M:%S')}  {sentence or 'can be read again'}")
        sys.stdout.flush()
        if last.found and all(status.doing.activity.is_over for _, status in last.found):
            return
        watcher.wait(3600.0)
