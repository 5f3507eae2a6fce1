"""Runs work in several processes that never outlive it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from kempner.run.process.exit_codes import RunError
from kempner.run.process.worker_process import born_deaf, killed_on_error, stay_deaf

Item = TypeVar("Item")
Result = TypeVar("Result")

_task: Callable[[Any], Any]  # in a worker process: what it does with every item


def run_all(
    task: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    on_done: Callable[[Item], None],
) -> list[Result]:
    """The result of every item, in order; `on_done` hears of each as it gets done.

    With one worker everything happens in the calling process. The task goes to each process once.
    Raises what the task raises; RunError if a process was killed. No process is left then.
    """
    workers = min(workers, len(items))
    if workers == 1:
        return [_alone(task, item, on_done) for item in items]
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=partial(_enter, os.getpid(), task)
    )
    try:
        with killed_on_error():
            return _together(pool, items, on_done)
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process was killed, perhaps out of memory: "
            "run the same command again with fewer --workers; finished files are kept"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _alone(task: Callable[[Item], Result], item: Item, on_done: Callable[[Item], None]) -> Result:
    result = task(item)
    on_done(item)
    return result


def _together(
    pool: ProcessPoolExecutor, items: Sequence[Item], on_done: Callable[[Item], None]
) -> list[Any]:
    with born_deaf():
        futures: dict[Future[Any], Item] = {pool.submit(_work, item): item for item in items}
    for future in as_completed(futures):
        future.result()
        on_done(futures[future])
    return [future.result() for future in futures]


def _enter(parent: int, task: Callable[[Any], Any]) -> None:
    global _task
    stay_deaf(parent)
    _task = task


def _work(item: Any) -> Any:
    return _task(item)
