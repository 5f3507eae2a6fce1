"""Progress bars of the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(console: Console, doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that shows (bytes done, bytes in all) as it is told; nothing where nobody looks."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(doing, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def counter(doing: str, in_all: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes, on the standard error, that counts what it is told."""
    done = 0
    with bar(Console(stderr=True), doing) as show:

        def count(length: int) -> None:
            nonlocal done
            done += length
            show(done, in_all)

        yield count
