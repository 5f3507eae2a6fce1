"""Whether an attempt of a program that knows nothing of kempner got on: a pure function.

Nobody is told what such a program has saved. Its step tells, if it tells that; otherwise time does.
"""

from __future__ import annotations

STARTED = 10.0
"""Seconds after which a program that is asked to stop counts as one that was at work. How long it
needs to begin is not known; a job that is stopped sooner than that would be requeued for ever."""


def has_advanced(
    step: int | None, before: int | None, seconds: float, asked_to_stop: bool, long: float
) -> bool:
    """Whether an attempt that ran for `seconds` brought the program further than all before it.

    `step` is the furthest that it has told, `before` the furthest of all earlier attempts; None for
    what was not told. Without a step an attempt that failed must have run for `long` seconds.
    """
    if step is not None:
        return step > (before or 0)
    return seconds >= (STARTED if asked_to_stop else long)
