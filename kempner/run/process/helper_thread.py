"""Threads that the process cannot do without: one that fails is loud, and is started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
