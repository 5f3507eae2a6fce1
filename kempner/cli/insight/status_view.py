"""The status of a run, or of many, as a view for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from rich import box
from rich.align import Align
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kempner.cli.insight import status_words as words
from kempner.insight.report.page.words import count, duration
from kempner.insight.status.activity import Activity
from kempner.insight.status.summary import Status

WIDEST = 110
"""Columns beyond which a line is hard to read."""

NARROW = 70
"""Columns below which only what is needed most is shown."""

NAMES = 17
"""Columns of the names, so that all values begin in the same one."""

LONGEST_CURVE = 40
"""Columns of a curve."""

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
    """Show it on standard output, once."""
    console = Console(highlight=False)
    console.print(view(found, together=together, columns=console.width))


def view(found: Sequence[tuple[str, Status]], *, together: bool, columns: int) -> RenderableType:
    """One run in full, or all of them, a line each, where they are shown `together`."""
    if together:
        return table(found, columns)
    return Group(*(panel(name, status, columns) for name, status in found))


def panel(
    name: str, status: Status, columns: int, note: str = "", lists: int = 2
) -> RenderableType:
    """One run. `note` is what the bottom says beside the time; `lists` is how many are shown: the
    interruptions, then the ranks.
    """
    width = min(columns, WIDEST)
    style = _style(status)
    parts: list[RenderableType] = [_headline(status), *_bar(status, width - 6), Text()]
    parts.append(_details(status, width - 6))
    if status.ends and lists > 0:
        parts += [Text(), _interruptions(status)]
    if status.ranks.groups and lists > 1:
        parts += [Text(), _ranks(status)]
    if status.facts.gave_up is not None:
        parts += [Text(), Text(str(status.facts.gave_up), style="red")]
    parts += [Text(sentence, style="yellow", overflow="fold") for sentence in status.facts.unread]
    title = Path(name).name or "no run yet"
    return Panel(
        Group(*parts),
        title=Text(f" {title} ", style="bold"),
        title_align="left",
        subtitle=_bottom(status, note),
        subtitle_align="right",
        border_style=style.replace("bold ", ""),
        box=box.ROUNDED,
        padding=(0, 2),
        width=width,
    )


def _bottom(status: Status, note: str) -> Text:
    clock = f"{datetime.fromtimestamp(status.now):%H:%M:%S}"
    return Text(f" {clock}{f' · {note}' if note else ''} ", style="dim")


def _headline(status: Status) -> Text:
    """What it is doing, and why."""
    activity, reason = status.doing
    style = _style(status)
    line = Text("● ", style=style)
    line.append(str(activity), style=f"bold {style}".replace("bold bold", "bold"))
    if reason:
        line.append(f"  {reason}")
    return line


def _bar(status: Status, width: int) -> Iterator[RenderableType]:
    """How far the run is, where that is known."""
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
    """Names and values; curves of loss and speed where there is room."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=NAMES)
    grid.add_column(ratio=1)
    curves = {
        "loss": status.curve("loss"),
        "speed": _if_it_varies(status.curve("tokens_per_second")),
    }
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
                f"  {sparkline(curves[name], room, from_zero=name == 'speed')}", style="dim green"
            )
        grid.add_row(name, shown)
    return grid


def _if_it_varies(speeds: Sequence[float]) -> Sequence[float]:
    """A speed that stays the same needs no curve."""
    return speeds if speeds and min(speeds) < 0.8 * max(speeds) else ()


def _emphasis(name: str, value: str, status: Status) -> str:
    """What a person has to see first."""
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
    """The course of a number, in as many columns; each shows the mean of its share of them.

    From the lowest of these means to the highest, or from zero.
    """
    many = min(columns, len(values))
    edges = [round(n * len(values) / many) for n in range(many + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = 0.0 if from_zero else min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _interruptions(status: Status) -> Table:
    """The last interruptions, the newest first."""
    grid = _list("interrupted")
    for end in reversed(status.ends):
        when = words.moment(end.time, status.now)
        grid.add_row(when, Text(words.describe_end(end), overflow="fold"))
    return grid


def _ranks(status: Status) -> Table:
    grid = _list("ranks")
    for name, value in words.places(status):
        name, _, place = value.partition(": ") if name == "ranks" else (name, "", value)
        grid.add_row(name, Text(place, overflow="fold"))
    return grid


def _list(title: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=NAMES)
    grid.add_column(ratio=1)
    grid.add_row(Text(title, style="bold not dim"), "")
    return grid


def table(found: Sequence[tuple[str, Status]], columns: int, note: str = "") -> RenderableType:
    """All runs, one line each."""
    if not found:
        return Text("no run yet", style="dim")
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, expand=False)
    narrow = columns < NARROW
    shown.add_column("run", style="bold", overflow="fold", ratio=None)
    shown.add_column("state", overflow="fold")
    shown.add_column("step", justify="right", no_wrap=True)
    if not narrow:
        for name in ("loss", "tokens/s", "left", "attempt"):
            shown.add_column(name, justify="right", no_wrap=True)
    if columns >= WIDEST:
        shown.add_column("job", no_wrap=True)
    for name, status in found:
        shown.add_row(*_cells(name, status, narrow, columns >= WIDEST))
    live = sum(status.doing.activity.is_live for _, status in found)
    bottom = f"{count(len(found), 'run')}, {live} live{f' · {note}' if note else ''}"
    return Group(shown, Align.left(Text(bottom, style="dim")))


def _cells(name: str, status: Status, narrow: bool, wide: bool) -> Iterator[RenderableType]:
    progress, activity = status.progress, status.doing.activity
    style = _style(status)
    yield Text(Path(name).name)
    yield Text(f"● {words.short_state(status)}", style=style)
    yield Text(words.step(progress).replace(" of ", "/"))
    if narrow:
        return
    live = activity.is_live
    yield Text(words.UNKNOWN if progress.loss is None else f"{progress.loss:.4f}")
    rate = progress.pace.tokens_per_second if live else None
    yield Text(words.UNKNOWN if rate is None else f"{rate:,.0f}")
    left = None if status.outlook.done_at is None else max(0.0, status.outlook.done_at - status.now)
    yield Text(words.UNKNOWN if left is None else duration(round(left)))
    yield Text(words.UNKNOWN if status.attempt is None else str(status.attempt.number))
    if wide:
        yield Text("" if status.job is None else words.describe_job(status.job))
