"""Progress that commands show on a terminal."""

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
    """Yield a callback (bytes done, bytes in all) that updates a bar; without a terminal it does
    nothing."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(doing, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def busy(doing: str) -> Iterator[None]:
    """Show a line with the elapsed seconds on stderr during the block, if that is a terminal."""
    console = SteadyConsole(stderr=True)
    if not console.is_terminal:
        yield
        return
    what = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn("line"), what, TimeElapsedColumn())
    # Output to a terminal appears above the line.
    onto = sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=onto) as progress:
        progress.add_task(doing, total=None)
        yield


@contextmanager
def counter(doing: str, in_all: int) -> Iterator[Callable[[int], None]]:
    """Yield a thread-safe callback that adds bytes to a progress bar on stderr."""
    done, lock = 0, threading.Lock()
    with bar(SteadyConsole(stderr=True), doing) as show:

        def count(length: int) -> None:
            nonlocal done
            with lock:
                done += length
            show(done, in_all)

        yield count
