"""The daemon: starts an attempt, passes stop requests on, and tells how it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kempner.config.sections import SuperviseSection
from kempner.run.attempts import Attempt, begin_attempt
from kempner.run.exit_codes import ExitCode
from kempner.run.layout import RunDirectory
from kempner.run.ledger import Ledger
from kempner.run.logs import logger
from kempner.run.signals import Received, SignalInbox
from kempner.supervisor.launcher import Launcher
from kempner.supervisor.policy import Decision, RankExit, decide, failed

POLL = 0.1
"""Seconds between looks at the ranks; a signal ends the wait at once."""

INSIST_WITHIN = 2.0
"""Seconds within which a second Ctrl-C means: now."""


@dataclass
class Watch:
    """What the supervisor knows of the attempt under way; times are `time.monotonic` seconds."""

    exits: list[RankExit] = field(default_factory=list)
    stop_asked_at: float | None = None
    failed_at: float | None = None
    signals_seen: int = 0


def supervise(
    run: RunDirectory,
    launcher: Launcher,
    arguments: Sequence[str],
    size: int,
    section: SuperviseSection,
    signals: SignalInbox,
) -> ExitCode:
    """Run one attempt to its end; returns the exit code of the run."""
    signals.react_with(None)  # from here on a stop is passed on to the ranks
    attempt = begin_attempt(run)
    ledger = Ledger(run.ledger)
    ledger.record("attempt_started", attempt=attempt.number, ranks=size)
    launcher.start(attempt, arguments)
    watch = Watch()
    try:
        while launcher.alive():
            signals.wait(watch.signals_seen, timeout=POLL)
            _note_ends(launcher, watch)
            if _pass_on_signals(ledger, attempt, launcher, watch, signals.received):
                return _leave_at_once(ledger, attempt)
            _enforce(launcher, watch, section)
    finally:
        launcher.kill()
    decision = decide(watch.exits, stop_requested=watch.stop_asked_at is not None)
    _close(ledger, attempt, decision, watch.exits)
    return decision.code


def insists(received: Sequence[Received]) -> bool:
    """Whether the user pressed Ctrl-C twice within `INSIST_WITHIN` seconds."""
    times = [r.at for r in received if r.signal == signal.SIGINT]
    return any(later - earlier <= INSIST_WITHIN for earlier, later in pairwise(times))


def _note_ends(launcher: Launcher, watch: Watch) -> None:
    for gone in launcher.ended():
        watch.exits.append(gone)
        if failed(gone) and watch.failed_at is None:
            watch.failed_at = time.monotonic()
        if gone.status == ExitCode.STOPPED and watch.stop_asked_at is None:
            # A rank that was signalled alone, before it knew the others: they would wait for it.
            watch.stop_asked_at = time.monotonic()
            launcher.ask_to_stop()


def _pass_on_signals(
    ledger: Ledger,
    attempt: Attempt,
    launcher: Launcher,
    watch: Watch,
    received: Sequence[Received],
) -> bool:
    """Ask the ranks to stop if a signal came; True if the user insists."""
    if len(received) == watch.signals_seen:
        return False
    watch.signals_seen = len(received)
    if watch.stop_asked_at is None:
        name = received[0].signal.name
        logger().warning(f"{name}: stopping after this step, with a checkpoint")
        ledger.record("stop_requested", attempt=attempt.number, reason=name)
        watch.stop_asked_at = time.monotonic()
    launcher.ask_to_stop()
    return insists(received)


def _enforce(launcher: Launcher, watch: Watch, section: SuperviseSection) -> None:
    """End ranks that outstay a stop, or the failure of another."""
    now = time.monotonic()
    overdue = watch.stop_asked_at is not None and now - watch.stop_asked_at > section.stop_grace
    orphaned = watch.failed_at is not None and now - watch.failed_at > section.crash_grace
    if overdue or orphaned:
        launcher.kill()


def _leave_at_once(ledger: Ledger, attempt: Attempt) -> ExitCode:
    reason = "left at once on the second Ctrl-C; the last commit is intact"
    _close(ledger, attempt, Decision(ExitCode.INTERRUPTED, reason), [])
    return ExitCode.INTERRUPTED


def _close(ledger: Ledger, attempt: Attempt, decision: Decision, exits: Sequence[RankExit]) -> None:
    ledger.record(
        "attempt_ended",
        attempt=attempt.number,
        code=int(decision.code),
        reason=decision.reason,
        culprit=decision.culprit,
        exits={str(e.rank): e.status for e in exits},
    )
    if decision.code is not ExitCode.COMPLETED:
        logger().warning(decision.reason)
