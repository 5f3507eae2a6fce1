"""What the commands show while they are at work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kempner.training.observe.progress_bar import SteadyConsole


@contextmanager
def bar(console: Console, doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is updated with (bytes done, bytes in all); nothing without a terminal."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(doing, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def busy(doing: str) -> Iterator[None]:
    """A line with the seconds so far, on the standard error while this lasts; then it is gone.

    Nothing where that is no terminal.
    """
    console = SteadyConsole(stderr=True)
    if not console.is_terminal:
        yield
        return
    what = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn("line"), what, TimeElapsedColumn())
    # What is printed meanwhile comes above the line, unless it goes to a file.
    onto = sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=onto) as progress:
        progress.add_task(doing, total=None)
        yield


@contextmanager
def counter(doing: str, in_all: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes, on the standard error, that counts what any thread tells it."""
    done, lock = 0, threading.Lock()
    with bar(SteadyConsole(stderr=True), doing) as show:

        def count(length: int) -> None:
            nonlocal done
            with lock:
                done += length
            show(done, in_all)

        yield count
