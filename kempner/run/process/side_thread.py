"""Waits for something slow on a thread, so that a stop is noticed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

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
