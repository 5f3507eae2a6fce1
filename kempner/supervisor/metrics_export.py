"""Exporters of metrics: processes of their own, so that nothing they do touches the training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

from kempner.config.sections import MetricsSection
from kempner.run.control.launch_env import EXPORT_FOR
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.signals import stop_signals_blocked
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.run.record.run_dir import RunDirectory

LEFT_WITHIN, LEFT_AT_LAST = 5.0, 60.0
"""Seconds at the end of a job in which all exporters hand on what is left; then they are killed.
The second is for a run that is complete: no later start hands on what is missing."""


SILENT = 2.0
"""Seconds of it after which the user is told what is waited for."""


@dataclass(frozen=True)
class Export:
    """An exporter to start: its name, which is that of its extra, the options of `kempner metrics`,
    and the module that it needs."""

    name: str
    options: Sequence[str]
    module: str | None = None


def wanted_exports(section: MetricsSection) -> Iterator[Export]:
    """What the configuration asks for."""
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
    """The exporters of a run. Each follows metrics.jsonl by itself, with a log in `exports/`.

    They take no part in training: no rank knows of them. One that fails, hangs or finds the disk
    full is told of once, or killed at the end, and goes on where it was at the next start.
    """

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = threading.Event()

    def start(self, run: RunDirectory, section: MetricsSection) -> None:
        """To be called in the main thread: they end with the thread that has started them."""
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
            threading.Thread(target=self._follow, args=(export.name,), daemon=True).start()

    def close(self, complete: bool = False) -> None:
        """Let them hand on what is left, and end them. `complete`: the run is not started again."""
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
                with suppress(ProcessLookupError):  # with all that it has started
                    os.killpg(process.pid, signal.SIGKILL)
                if complete:
                    logger().warning(
                        f"metrics.{name}: not all metrics of the run were handed on; "
                        "`kempner metrics` goes on from there"
                    )

    def _follow(self, name: str) -> None:
        """Wait for the end of an exporter, and log it if it failed."""
        code = self._running[name].wait()
        if code and not self._closing.is_set():
            logger().warning(
                f"metrics.{name}: its exporter failed; see exports/{name}.log", code=code
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def _start(run: RunDirectory, export: Export) -> subprocess.Popen[bytes]:
    """In the supervisor's session, or it would be taken for one of the ranks' processes; in a group
    of its own, which a terminal's Ctrl-C does not reach. Raises `OSError`."""
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
    # A SIGTERM that comes while its interpreter starts waits until `kempner metrics` traps it.
    with (run.exports / f"{export.name}.log").open("wb") as log, stop_signals_blocked():
        return subprocess.Popen(
            command,
            env={**os.environ, EXPORT_FOR: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
