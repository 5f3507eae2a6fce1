"""Threads: those that must not end unseen, those that wait for something slow, and their states."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kempner.run.output.logs import logger

PAUSE = 1.0
"""Seconds before a thread that failed begins again, or that could not be started is started."""

TRIES = 60
"""Times that a thread is tried to be started: the machine may have no room for one just now."""


def helper_thread(
    work: Callable[[], None], name: str, pause: Callable[[float], object] = time.sleep
) -> threading.Thread:
    """A daemon thread, not started yet, that does `work`, and again where that raises, until it
    returns.
    """

    def run() -> None:
        while True:
            try:
                return work()
            except Exception:  # noqa: BLE001 - whatever it is, the run needs this thread
                logger().error(f"the thread {name!r} failed and begins again", exc_info=True)
            pause(PAUSE)

    return threading.Thread(target=run, name=name, daemon=True)


def keep_running(
    name: str, work: Callable[[], None], pause: Callable[[float], object] = time.sleep
) -> threading.Thread:
    """Run `work` in a daemon thread until it returns; if it raises, from its beginning again.

    Raises `RuntimeError` if no thread can be started for a minute.
    """
    return _start(helper_thread(work, name, pause), pause)


def start_thread(
    name: str, work: Callable[[], None], pause: Callable[[float], object] = time.sleep
) -> threading.Thread:
    """Run `work` in a daemon thread, once.

    Raises `RuntimeError` if no thread can be started for a minute.
    """
    return _start(threading.Thread(target=work, name=name, daemon=True), pause)


def _start(thread: threading.Thread, pause: Callable[[float], object]) -> threading.Thread:
    for left in reversed(range(TRIES)):
        try:
            thread.start()
            break
        except RuntimeError:
            if not left:
                raise
            pause(PAUSE)
    return thread


T = TypeVar("T")

LOOK = 0.2
"""Seconds between two looks whether to go on waiting."""


def unless(stop: Callable[[], bool], work: Callable[[], T], name: str) -> T | None:
    """What `work` returns; None as soon as `stop()` is true, and the work is left to itself.

    `name` is that of the thread. Raises what the work raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=do, name=name, daemon=True).start()
    while not done.wait(LOOK):
        if stop():
            return None
    if errors:
        raise errors[0]
    return results[0]


def call_at_end_of(pid: int, react: Callable[[], object]) -> None:
    """Call `react` once a process of this machine has ended, from a thread; now if it is gone."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        react()
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        while not poll.poll():
            pass
        react()

    threading.Thread(target=wait, name="parent", daemon=True).start()
