"""Runs work in several processes that never outlive it."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

from kempner.run.process.exit_codes import RunError
from kempner.run.process.worker_process import (
    ignore_stop_signals,
    killed_on_error,
    signals_blocked_in_children,
)

Item = TypeVar("Item")
Result = TypeVar("Result")

Report = Callable[[int], None]  # told how much of an item is done
Task = Callable[[Item, Report], Result]

_INTERVAL = 0.1  # seconds between two reports of one process


def run_all(
    task: Task[Item, Result],
    items: Sequence[Item],
    workers: int,
    on_progress: Callable[[int, int], None],
) -> list[Result]:
    """The result of every item, in order; `on_progress` hears (number of the item, how much).
    Without workers everything happens in the calling process. The task goes to each process once.
    Raises what the task raises; RunError if a process was killed. No process is left then."""
    if not workers:
        return [
            task(item, lambda done, n=number: on_progress(n, done))  # type: ignore[misc]
            for number, item in enumerate(items)
        ]
    results: dict[int, Result] = {}
    with killed_on_error():
        started = [_start(task) for _ in range(min(workers, len(items)))]
        lines = [line for _, line in started]
        waiting = iter(enumerate(items))
        busy = [line for line in lines if _hand_out(line, waiting)]
        while busy:
            # Nothing is waited for but messages: an interruption is answered at once.
            for line in cast(list[Connection], connection.wait(busy)):
                number, done, result = _receive(line)
                if not done:
                    on_progress(number, result)
                    continue
                results[number] = result
                if not _hand_out(line, waiting):
                    busy.remove(line)
        for process, _ in started:
            process.join()
    return [results[number] for number in range(len(items))]


def _start(task: Task[Any, Any]) -> tuple[BaseProcess, Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(os.getpid(), task, theirs), daemon=True)
    with signals_blocked_in_children():
        process.start()
    theirs.close()
    return process, ours


def _hand_out(line: Connection, waiting: Iterator[tuple[int, Any]]) -> bool:
    """Give a process the next item; without one it ends."""
    item = next(waiting, None)
    try:
        line.send(item)
    except OSError as error:
        raise _killed() from error
    return item is not None


def _receive(line: Connection) -> tuple[int, bool, Any]:
    try:
        number, done, content = line.recv()
    except (EOFError, OSError) as error:
        raise _killed() from error
    if isinstance(content, BaseException):
        raise content
    return number, done, content


def _killed() -> RunError:
    return RunError(
        "a worker process was killed, perhaps out of memory: "
        "run the same command again with fewer --workers; finished files are kept"
    )


def _work(parent: int, task: Task[Any, Any], line: Connection) -> None:
    """In a process of its own: item after item, until all are done."""
    ignore_stop_signals(parent)
    while (work := line.recv()) is not None:
        number, item = work
        try:
            content = task(item, _reporter(line, number))
        except Exception as error:  # noqa: BLE001 - it is raised where it can be reported
            if not isinstance(error, RunError):
                error.add_note(traceback.format_exc())
            content = error
        line.send((number, True, content))


def _reporter(line: Connection, number: int) -> Report:
    last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > _INTERVAL:
            last = time.monotonic()
            line.send((number, False, done))

    return report
