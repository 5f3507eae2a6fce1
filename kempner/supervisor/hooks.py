"""Runs the site's hooks: commands that are run for events of the ledger.

They run one after the other, in the background: none of them delays the ranks, and a hook that
fails does not change the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue

from kempner.cluster.machine.shell_command import run_shell
from kempner.config.site import HooksSection
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.threads import start_thread
from kempner.run.record.events import (
    AttemptEnded,
    LedgerEvent,
    NodeSuspected,
    NotRequeued,
    RunGivenUp,
)
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory

LEFT_ALONE = 5.0
"""Seconds beyond its timeout for a hook that cannot even be killed, before it is left behind."""


class Hooks:
    """The hooks of a run."""

    def __init__(self, section: HooksSection, run: RunDirectory) -> None:
        self._section, self._run = section, run
        self._waiting: SimpleQueue[tuple[str, str, dict[str, str]] | None] = SimpleQueue()
        self._left = 0
        self._done = 0
        self._started = False

    def hear(self, event: LedgerEvent, attempt: int) -> None:
        """Have the hook of an event run, if there is one."""
        name = hook_of(event)
        command = getattr(self._section, name) if name else None
        if command is None:
            return
        facts = {**about_run(self._run, attempt), **about_event(name, event)}
        self._waiting.put((name, command, facts))
        self._left += 1
        if not self._started:
            self._started = True
            start_thread("hooks", self._work)

    def close(self) -> None:
        """Wait for hooks that still run, each for as long as it may."""
        while self._left > self._done:
            before, patience = self._done, time.monotonic() + self._section.timeout + LEFT_ALONE
            while self._done == before and time.monotonic() < patience:
                time.sleep(0.05)
            if self._done == before:
                logger().warning("a hook cannot be killed, and is left behind")
                return

    def _work(self) -> None:
        while (hook := self._waiting.get()) is not None:
            name, command, facts = hook
            try:
                run_hook(name, command, facts, self._section.timeout)
            finally:
                self._done += 1


class LedgerWithHooks(Ledger):
    """A ledger that runs the hook of each event once the event is written."""

    def __init__(self, path: Path, hooks: Hooks) -> None:
        super().__init__(path)
        self._hooks = hooks

    def record(self, event: LedgerEvent, attempt: int) -> None:
        """Append an event, and have its hook run."""
        super().record(event, attempt)
        self._hooks.hear(event, attempt)


def hook_of(event: LedgerEvent) -> str:
    """The key in `[hooks]` of what an event says; empty if there is none."""
    match event:
        case NodeSuspected():
            return "node_suspect"
        case RunGivenUp():
            return "give_up"
        case NotRequeued():
            return "not_requeued"
        case AttemptEnded(code, left_at=None) if code == ExitCode.COMPLETED:
            return "completed"
    return ""


def about_run(run: RunDirectory, attempt: int) -> dict[str, str]:
    """What every hook is told."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return {
        "KEMPNER_RUN_NAME": run.path.name,
        "KEMPNER_RUN_PATH": str(run.path.absolute()),
        "KEMPNER_ATTEMPT_NUMBER": str(attempt),
        "KEMPNER_JOB_ID": job,
    }


def about_event(name: str, event: LedgerEvent) -> dict[str, str]:
    """An event's facts by variable; a fact that is not known is empty."""
    fields: Mapping[str, object] = event.to_fields()
    simple = {
        f"KEMPNER_{key.upper()}": "" if value is None else str(value)
        for key, value in fields.items()
        if value is None or isinstance(value, str | int | float)
    }
    return {**simple, "KEMPNER_EVENT": name}


def run_hook(name: str, command: str, facts: Mapping[str, str], seconds: float) -> str:
    """Run a hook, with its output in the log; what went wrong, in words, or nothing."""
    end = run_shell(command, facts, seconds)
    logger().info("a hook has ended", hook=name, status=end.status, said=end.said.strip())
    if end.failure:
        logger().warning(f"hooks.{name} failed: {end.failure}")
    return end.failure
