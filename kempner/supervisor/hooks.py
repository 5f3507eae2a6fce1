"""What runs beside a run without disturbing it: the site's hooks, which are commands for events of
the ledger; and the exporters of metrics, which are processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

from kempner.cluster.machine import run_shell
from kempner.config.sections import MetricsSection
from kempner.config.site import HooksSection
from kempner.run.control.launch_env import EXPORT_FOR, SUPERVISED
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import stop_signals_blocked
from kempner.run.process.threads import start_thread
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.run.record.events import (
    AttemptEnded,
    CheckpointCommitted,
    LedgerEvent,
    NodeSuspected,
    NotRequeued,
    RunGivenUp,
)
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.watchdog.board import board

LEFT_ALONE = 5.0
"""Seconds beyond its timeout after which a hook that cannot be killed is abandoned."""


class Hooks:
    def __init__(self, section: HooksSection, run: RunDirectory) -> None:
        self._section, self._run = section, run
        self._waiting: SimpleQueue[tuple[str, str, dict[str, str]] | None] = SimpleQueue()
        self._left = 0
        self._done = 0
        self._started = False

    def hear(self, name: str, event: LedgerEvent, attempt: int) -> None:
        if (command := getattr(self._section, name)) is None:
            return
        facts = {**about_run(self._run, attempt), **about_event(name, event)}
        self._waiting.put((name, command, facts))
        self._left += 1
        if not self._started:
            self._started = True
            start_thread("hooks", self._work)

    def close(self) -> None:
        """Wait for hooks that still run, each until its timeout."""
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
    def __init__(self, path: Path, hooks: Hooks) -> None:
        super().__init__(path)
        self._hooks = hooks

    def record(self, event: LedgerEvent, attempt: int) -> None:
        if isinstance(event, CheckpointCommitted):
            board().tell_step(event.step, new=True)
        super().record(event, attempt)
        if name := hook_of(event):
            self._hooks.hear(name, event, attempt)


def hook_of(event: LedgerEvent) -> str:
    """The key in `[hooks]` for an event; empty if there is none."""
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
    job = os.environ.get("SLURM_JOB_ID", "")
    return {
        "KEMPNER_RUN_NAME": run.path.name,
        "KEMPNER_RUN_PATH": str(run.path.absolute()),
        "KEMPNER_ATTEMPT_NUMBER": str(attempt),
        "KEMPNER_JOB_ID": job,
        SUPERVISED: "",  # a hook is not part of the run
    }


def about_event(name: str, event: LedgerEvent) -> dict[str, str]:
    """The environment variables with an event's fields; an unknown value is empty."""
    fields: Mapping[str, object] = event.to_fields()
    simple = {
        f"KEMPNER_{key.upper()}": "" if value is None else str(value)
        for key, value in fields.items()
        if value is None or isinstance(value, str | int | float)
    }
    return {**simple, "KEMPNER_EVENT": name}


def run_hook(name: str, command: str, facts: Mapping[str, str], seconds: float) -> str:
    """Run a hook, and log its output; what went wrong, or an empty text."""
    end = run_shell(command, facts, seconds)
    logger().info("a hook has ended", hook=name, status=end.status, said=end.output.strip())
    if end.failure:
        logger().warning(f"hooks.{name} failed: {end.failure}")
    return end.failure


LEFT_WITHIN, LEFT_AT_LAST = 5.0, 60.0
"""Seconds at the end of a job for all exporters to hand on the last metrics, before they are
killed; and for a run that is complete, since no later start hands on what is missing."""

SILENT = 2.0
"""Seconds of that wait after which the user is told of it."""


@dataclass(frozen=True)
class Export:
    """An exporter to start: its name, also that of its extra, its options of `kempner metrics`, and
    the module that it needs."""

    name: str
    options: Sequence[str]
    module: str | None = None


def wanted_exports(section: MetricsSection) -> Iterator[Export]:
    if section.tensorboard:
        yield Export("tensorboard", ["--tensorboard"], "tensorboard")
    if section.wandb is not None:
        yield Export("wandb", ["--wandb", section.wandb], "wandb")
    if section.prometheus is not None:
        yield Export("prometheus", ["--prometheus", section.prometheus])
    if section.opentelemetry is not None:
        options = ["--opentelemetry", section.opentelemetry]
        yield Export("opentelemetry", options, "opentelemetry.exporter.otlp.proto.http")


class MetricsExports:
    """The exporters of a run. Each is a process that follows metrics.jsonl, with a log in
    `exports/`. No rank knows of them. An exporter that fails is reported once, one that hangs is
    killed at the end, and the next start continues where it was."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = threading.Event()

    def start(self, run: RunDirectory, section: MetricsSection) -> None:
        """Call in the main thread: the exporters end with the thread that started them."""
        for export in wanted_exports(section):
            if export.module is not None and not _is_installed(export.module):
                logger().warning(
                    f"metrics.{export.name} has no effect: {export.name} is not installed "
                    f"(pip install 'kempner[{export.name}]'); metrics.jsonl has everything"
                )
                continue
            try:
                self._running[export.name] = _start(run, export)
            except OSError as error:
                logger().warning(f"metrics.{export.name} has no effect", error=str(error))
                continue
            start_thread("exporter", partial(self._follow, export.name))

    def close(self, complete: bool = False) -> None:
        """Let the exporters hand on the last metrics, and end them. `complete`: the run will not be
        started again."""
        self._closing.set()
        for process in self._running.values():
            process.terminate()
        end = time.monotonic() + (LEFT_AT_LAST if complete else LEFT_WITHIN)
        for name, process in self._running.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(SILENT, max(0.0, end - time.monotonic())))
            if complete and process.poll() is None:
                say(f"metrics.{name}: handing on the last metrics, for up to {LEFT_AT_LAST:.0f} s")
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):  # kill all that it has started, too
                    os.killpg(process.pid, signal.SIGKILL)
                if complete:
                    logger().warning(
                        f"metrics.{name}: not all metrics of the run were handed on; "
                        "`kempner metrics` goes on from there"
                    )

    def _follow(self, name: str) -> None:
        code = self._running[name].wait()
        if code and not self._closing.is_set():
            logger().warning(
                f"metrics.{name}: its exporter failed; see exports/{name}.log", code=code
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _start(run: RunDirectory, export: Export) -> subprocess.Popen[bytes]:
    """Start an exporter in the supervisor's session, or it would be taken for a rank's process, but
    in its own process group, which a terminal's Ctrl-C does not reach. Raises `OSError`."""
    run.exports.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        *SAFE_MODULE,
        "kempner",
        "metrics",
        str(run.path),
        *export.options,
        "--follow",
    ]
    # SIGTERM is blocked while its interpreter starts, until `kempner metrics` traps it.
    with (run.exports / f"{export.name}.log").open("wb") as log, stop_signals_blocked():
        return subprocess.Popen(
            command,
            env={**os.environ, EXPORT_FOR: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
