"""What the exit of a program that knows nothing of kempner means, and whether an attempt of it made
progress: pure functions.

What such a program has saved is not known. Progress is judged by the steps that it reports, or by
time if it reports none.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from kempner.config.program import ProgramSection
from kempner.run.process.exit_codes import ExitCode
from kempner.supervisor.policy.outcome import RankExit


def interpret(end: RankExit, codes: ProgramSection, complete: bool) -> RankExit:
    """How a rank ended, with what that stands for by `codes`.

    `complete` says that a rank has said that the run is complete. A code in `fail_codes` takes
    precedence over that. Next is a code in `done_codes`; but 0 is also how programs exit that were
    asked to stop, and have saved. A rank that was asked to stop and exits in any other way is to go
    on later. Of a rank that was killed, or whose end was not seen, nothing more is known.
    """
    status = end.status
    if status is None or end.ended_by_us:
        return end
    if status in codes.fail_codes:
        return replace(end, means=_failure(status), final=True)
    if complete or (status in codes.done_codes and not (end.asked and status == 0)):
        return replace(end, means=ExitCode.COMPLETED)
    if status in codes.requeue_codes or (end.asked and not _killed_from_outside(status)):
        return replace(end, means=ExitCode.STOPPED)
    if status in _NO_FAILURES:
        return replace(end, means=ExitCode.CRASHED)  # the user has given this code no such meaning
    return end


_NO_FAILURES = (ExitCode.COMPLETED, ExitCode.STOPPED, ExitCode.PEERS_LOST)
"""Codes that mean no failure of their own where kempner's ranks leave with them."""


def _killed_from_outside(status: int) -> bool:
    return status == -signal.SIGKILL  # by the kernel, or by Slurm


def _failure(status: int) -> ExitCode:
    known = next((code for code in ExitCode if code == status), ExitCode.CRASHED)
    return ExitCode.CRASHED if known in _NO_FAILURES else known


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
