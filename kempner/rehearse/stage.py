"""Starts the ranks of a rehearsal, each in a process of its own, and waits for their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol
from uuid import uuid4

from kempner.cluster.network.ports import free_port
from kempner.run.process.exit_codes import ExitCode
from kempner.supervisor.launchers.fork_server.client import CannotForkError, ForkServerClient
from kempner.supervisor.launchers.fork_server.messages import arguments_of_python

RANK = "kempner.training.rehearsal.rank"

MODULES = (
    *("torch", "numpy", "torch.utils.data", "kempner.training.survive"),
    "kempner.training.rehearsal.recorder",
)
"""What the ranks need anyway: they are forked from a process that has imported it."""

AFTER_A_DEATH = 5.0
"""Seconds that the other ranks have when one has died."""

SILENCED = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "disabled",
    "COMET_AUTO_LOG_DISABLE": "true",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables that keep a rehearsal from trackers. MLflow has none for this: it gets a folder."""


class StartedRank(Protocol):
    """A rank that runs or has ended."""

    pid: int

    def poll(self) -> int | None:
        """How it ended; None while it runs."""

    def wait(self) -> int | None:
        """The same, once it has ended; to be called once."""


class Stage:
    """Where ranks are started: two servers that fork them, which order sets otherwise.

    Python orders a set of words anew in each process; what is forked has the order of its server.
    """

    def __init__(self) -> None:
        self._servers = [ForkServerClient(MODULES) for _ in range(2)]

    @contextmanager
    def open(self) -> Iterator[Stage]:
        """Start the servers, and end them."""
        before = os.environ.get("PYTHONHASHSEED")
        try:
            for number, server in enumerate(self._servers, 1):
                if before is None:
                    os.environ["PYTHONHASHSEED"] = str(number)
                server.start()
        finally:
            if before is None:
                os.environ.pop("PYTHONHASHSEED", None)
        try:
            yield self
        finally:
            for server in self._servers:
                server.close()

    def run(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        outputs: Sequence[Path],
        other_order: bool,
    ) -> list[int]:
        """Run a rank for each of `outputs`, to which it prints; how they ended."""
        places = _places(len(outputs))
        started: list[StartedRank] = []
        try:
            for place, output in zip(places, outputs, strict=True):
                environ = {**os.environ, **SILENCED, **variables, **place}
                with open(output, "ab") as file:
                    started.append(self._start(command, environ, file, other_order))
            return _wait(started)
        finally:
            _kill(started)

    def _start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: BinaryIO,
        other_order: bool,
    ) -> StartedRank:
        hash_seed = {"PYTHONHASHSEED": str(1 + other_order)}
        arguments = arguments_of_python(command)
        if arguments is not None:
            ours = [sys.executable, "-m", RANK, *arguments]
            with suppress(CannotForkError):
                return self._servers[other_order].fork(ours, environ, output.fileno(), ours=True)
            command = ours
        return subprocess.Popen(
            command,
            env={**hash_seed, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _places(size: int) -> list[dict[str, str]]:
    """Torch's variables for each rank, on this machine."""
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1", uuid4().hex)),
        "TORCHELASTIC_RUN_ID": "rehearsal",  # says that these variables count
    }
    return [{**common, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(size)]


def _wait(started: Sequence[StartedRank]) -> list[int]:
    """Until all have ended; those whose peer has died are killed."""
    until = None
    while None in (codes := [rank.poll() for rank in started]):
        if until is None and any(code not in (None, 0, ExitCode.STOPPED) for code in codes):
            until = time.monotonic() + AFTER_A_DEATH
        if until is not None and time.monotonic() > until:
            _kill(started)
        time.sleep(0.02)
    return [rank.wait() or 0 for rank in started]


def _kill(started: Sequence[StartedRank]) -> None:
    """What still runs, with all that it has started."""
    for rank in started:
        if rank.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
