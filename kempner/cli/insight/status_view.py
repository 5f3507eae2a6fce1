"""The status of one run or many on a terminal, once or (`kempner status --watch`) live."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import typer
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kempner.cli.insight import status_words as words
from kempner.cli.insight.status_words import line
from kempner.insight.report.page.words import duration
from kempner.insight.status.activity import Activity
from kempner.insight.status.summary import Status
from kempner.run.output.units import count
from kempner.run.process.exit_codes import RunError
from kempner.run.process.threads import keep_running

WIDEST = 110  # columns beyond which a line is hard to read

NARROW, WIDE = 70, 95
"""Columns needed for a table of runs with time left, and for one with speed, attempt and job,
too."""

NAMES = 17  # width of the names, so that all values are aligned
LONGEST_CURVE = 40  # columns of a curve
STEADY = 0.85  # share of its highest value above which a speed always counts as steady

BARS = "▁▂▃▄▅▆▇█"

_STYLES = {
    Activity.TRAINING: "green",
    Activity.RUNNING: "green",
    Activity.EVALUATING: "green",
    Activity.SAVING: "cyan",
    Activity.LOADING: "cyan",
    Activity.STARTING: "cyan",
    Activity.HEALTH_CHECK: "cyan",
    Activity.QUEUED: "yellow",
    Activity.STOPPING: "yellow",
    Activity.RESTARTING: "yellow",
    Activity.STOPPED: "yellow",
    Activity.WAITING_FOR_STORAGE: "bold yellow",
    Activity.FAILED: "bold red",
    Activity.DEAD: "bold red",
    Activity.GIVEN_UP: "bold red",
    Activity.DONE: "blue",
}


def _style(status: Status) -> str:
    activity, reason = status.doing
    still = activity is Activity.TRAINING and reason
    return "bold yellow" if still else _STYLES.get(activity, "default")


def print_once(found: Sequence[tuple[str, Status]], *, together: bool) -> None:
    console = Console(highlight=False)
    console.print(view(found, together=together, columns=console.width))


def view(found: Sequence[tuple[str, Status]], *, together: bool, columns: int) -> RenderableType:
    if together:
        return table(found, columns)
    return Group(*(panel(name, status, columns) for name, status in found))


def panel(
    name: str, status: Status, columns: int, note: str = "", lists: int = 2
) -> RenderableType:
    """A panel for one run, with `note` beside the time at the bottom. `lists` is how many lists to
    show: 1 the interruptions, 2 also the ranks."""
    width = min(columns, WIDEST)
    style = _style(status)
    parts: list[RenderableType] = [_headline(status), *_bar(status, width - 6), Text()]
    parts.append(_details(status, width - 6))
    if status.ends and lists > 0:
        newest_first = reversed(status.ends)
        ends = [(words.moment(e.time, status.now), words.describe_end(e)) for e in newest_first]
        parts += [Text(), _list("interrupted", ends)]
    if status.ranks.groups and lists > 1:
        parts += [Text(), _list("ranks", words.places(status))]
    if status.facts.gave_up is not None:
        parts += [Text(), Text(str(status.facts.gave_up), style="red")]
    parts += [Text(sentence, style="yellow", overflow="fold") for sentence in status.facts.unread]
    title, clock = Path(name).name or "no run yet", f"{datetime.fromtimestamp(status.now):%H:%M:%S}"
    return Panel(
        Group(*parts),
        title=Text(f" {title} ", style="bold"),
        title_align="left",
        subtitle=Text(f" {clock}{f' · {note}' if note else ''} ", style="dim"),
        subtitle_align="right",
        border_style=style.replace("bold ", ""),
        box=box.ROUNDED,
        padding=(0, 2),
        width=width,
    )


def _headline(status: Status) -> Text:
    activity, reason = status.doing
    style = _style(status)
    line = Text("● ", style=style)
    line.append(str(activity), style=f"bold {style}".replace("bold bold", "bold"))
    if reason:
        line.append(f"  {reason}")
    return line


def _bar(status: Status, width: int) -> Iterator[RenderableType]:
    progress = status.progress
    if progress.step is None or not progress.total:
        return
    done = min(1.0, progress.step / progress.total)
    style = _style(status).replace("bold ", "")
    numbers = Text(f"{progress.step:,} / {progress.total:,}  {done:.1%}", style="bold")
    row = Table.grid(padding=(0, 2))
    row.add_column(width=max(10, width - len(numbers) - 2))
    row.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(
        total=1.0,
        completed=done,
        width=max(10, width - len(numbers) - 2),
        complete_style=style,
        finished_style=style,
    )
    row.add_row(bar, numbers)
    yield row


def _details(status: Status, width: int) -> Table:
    grid = _grid()
    curves = {"loss": status.curve("loss"), "speed": status.curve("tokens_per_second")}
    job = [] if status.job is None else words.job_rows(status.job)
    for name, value in (*words.facts(status), *job):
        if name == "step" and status.progress.total:
            continue  # the bar says so
        if name == "restarts" and status.job is not None and status.job.agrees:
            continue
        shown = Text(value, style=_emphasis(name, value, status), overflow="fold")
        room = min(LONGEST_CURVE, width - 26 - len(value))
        if room >= 8 and len(curves.get(name, ())) > 2:
            shown.append(
                f"  {sparkline(curves[name], room, from_zero=name == 'speed')}", style="green"
            )
        grid.add_row(name, shown)
    return grid


def _emphasis(name: str, value: str, status: Status) -> str:
    if value == words.UNKNOWN:
        return "dim"
    if name == "waits for" or "DAMAGED" in value or "DISAGREE" in value:
        return "bold yellow"
    if name == "next deadline" and status.doing.activity is Activity.STOPPING:
        return "bold yellow"
    if name == "allocation" and status.outlook.fits is False:
        return "yellow"
    return "yellow" if name == "slowest rank" and status.ranks.slowest is not None else ""


def sparkline(values: Sequence[float], columns: int, *, from_zero: bool = False) -> str:
    """A curve of bars; each column shows the mean of its part of the values, scaled from the lowest
    mean to the highest. With `from_zero` the scale begins at 0, and a steady curve is empty."""
    many = min(columns, len(values))
    edges = [round(n * len(values) / many) for n in range(many + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = 0.0 if from_zero else min(means), max(means)
    if from_zero and min(means) > STEADY * high:
        return ""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=NAMES)
    grid.add_column(ratio=1)
    return grid


def _list(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    grid = _grid()
    grid.add_row(Text(title, style="bold not dim"), "")
    for name, value in rows:
        grid.add_row(name, Text(value, overflow="fold"))
    return grid


def table(found: Sequence[tuple[str, Status]], columns: int, note: str = "") -> RenderableType:
    """All runs, one line each, and the reasons of their states below."""
    if not found:
        return Text("no run yet", style="dim")
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    shown.add_column("run", style="bold", no_wrap=True)
    shown.add_column("state", no_wrap=True)
    heads = ["step", "loss", "left"] if columns >= NARROW else ["step"]
    if columns >= WIDE:
        heads = ["step", "loss", "tokens/s", "left", "attempt", "job"]
    for head in heads:
        shown.add_column(head, justify="right", no_wrap=True)
    reasons = Table.grid(padding=(0, 2))
    reasons.add_column(no_wrap=True, max_width=columns // 3)
    reasons.add_column(style="dim", overflow="fold")
    for name, status in found:
        found_here = words.numbers(status)
        state = Text(f"● {status.doing.activity}", style=_style(status))
        values = (Text(found_here[head] or words.UNKNOWN) for head in heads)
        shown.add_row(Text(Path(name).name), state, *values)
        sentences = (*status.facts.unread, status.doing.reason, status.ranks.waits_for)
        if why := next((sentence for sentence in sentences if sentence), ""):
            reasons.add_row(Text(Path(name).name, style=_style(status)), Text(why))
    live = sum(status.doing.activity.is_live for _, status in found)
    bottom = f"{count(len(found), 'run')}, {live} live{f' · {note}' if note else ''}"
    parts = [shown, Padding(reasons, (0, 0, 1, 1))] if reasons.row_count else [shown]
    return Group(*parts, Padding(Text(bottom, style="dim"), (0, 0, 0, 1)))


EVERY = 2.0  # seconds between two reads: as often as a supervisor writes ranks.json

OLD_AFTER = 10.0
"""Seconds without an answer of the file system after which the view shows its age."""

Found: TypeAlias = Sequence[tuple[str, Status]]


@dataclass(frozen=True)
class Look:
    """The last successful read, `at` (`time.monotonic`, seconds), and an error since."""

    found: Found = ()
    at: float = 0.0
    error: RunError | None = None


class Watcher:
    """Reads in a thread, so that hanging storage holds up neither the view nor Ctrl-C."""

    def __init__(self, read: Callable[[], Found]) -> None:
        self._read, self._new = read, threading.Event()
        self.last = Look(at=time.monotonic())
        keep_running("status", self._follow)

    def wait(self, seconds: float) -> bool:
        """Wait for the next read; False after `seconds`."""
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
    """A watcher's last status, drawn for the terminal's current size. Parts that do not fit into
    its height are left out, unless `whole`."""

    def __init__(self, watcher: Watcher, *, together: bool, whole: bool = False) -> None:
        self._watcher, self._together, self._whole = watcher, together, whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        last, columns = self._watcher.last, options.max_width
        passed, note = time.monotonic() - last.at, "" if self._whole else "Ctrl-C leaves"
        if last.error is not None or passed > OLD_AFTER:
            note = f"{duration(round(passed))} old"
        wrong = () if last.error is None else (str(last.error),)
        found = [(name, status.later(passed, *wrong)) for name, status in last.found]
        if not found:
            yield Text(str(last.error or "reading ..."), style="dim")
        elif self._together:
            yield table(found, columns, note)
        else:
            for name, status in found:
                for lists in (2, 1, 0):  # as much of it as fits
                    drawn = panel(name, status, columns, note, lists)
                    if self._whole or len(console.render_lines(drawn)) <= console.height:
                        break
                yield drawn


def show_until_ctrl_c(read: Callable[[], Found], *, together: bool) -> None:
    """Show what `read` returns until Ctrl-C; where the terminal cannot redraw, as plain lines until
    all runs are over. Raises `RunError` if the first read fails."""
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
            while True:  # `Live` draws in a thread, also after a change of size
                watcher.wait(3600.0)
    finally:  # the last view stays after the screen is restored
        console.print(View(watcher, together=together, whole=True))


def print_lines(watcher: Watcher) -> None:
    printed_lines: dict[str, str] = {}
    complaint = ""
    while True:
        last = watcher.last
        for name, status in last.found:
            text = line(name or "no run yet", status)
            if printed_lines.get(name) != text:
                printed_lines[name] = text
                typer.echo(f"{time.strftime('%H:%M:%S')}  {text}")
        sentence = "" if last.error is None else str(last.error)
        if sentence != complaint:
            complaint = sentence
            typer.echo(f"{time.strftime('%H:%M:%S')}  {sentence or 'can be read again'}")
        sys.stdout.flush()
        if last.found and all(status.doing.activity.is_over for _, status in last.found):
            return
        watcher.wait(3600.0)
