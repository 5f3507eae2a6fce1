"""Reports errors of a node's NVIDIA GPUs: `python -m kempner.probe.gpu_events PARENT`.

It is a process of its own, since a call into the driver may never return once a GPU has fallen off
the bus. It needs nvidia-ml-py (the extra `gpu`); without it, or without a GPU, it exits at once. It
prints a line for each Xid and each new health problem, and exits with its parent.

Xid numbers: https://docs.nvidia.com/deploy/xid-errors/.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kempner.run.output.logs import logger
from kempner.run.process.signals import follow_parent
from kempner.run.process.threads import start_thread
from kempner.run.process.worker_process import SAFE_MODULE

DRIVER = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver is loaded."""

HEALTH_EVERY = 60.0
"""Seconds between two health checks."""

_PROGRAMS = {13, 31, 43, 45, 68}
"""Xids that a program caused: they are no errors of the GPU."""

_BROKEN = {
    48: "an uncorrectable memory error",
    62: "its controller has halted",
    64: "a row of its memory cannot be replaced",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    92: "too many correctable memory errors",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "an error of its system processor",
    136: "training of its links has failed",
    140: "an unrecovered memory error",
    143: "its memory cannot be initialised",
    155: "a link to other GPUs is down",
}
"""Xids after which a GPU needs at least a reset, and no other rank should start on its node."""

_PASSING = {
    63: "a row of its memory is replaced at the next reset",
    94: "a contained memory error",
    137: "an error of NVLink that was recovered",
}
"""Xids after which the GPU goes on, though its processes may not."""


@dataclass(frozen=True)
class GpuTrouble:
    """An error of the GPU with that index; `xid` is 0 for a health problem. `broken`: nothing
    should start there before it is repaired."""

    gpu: int
    xid: int
    reason: str
    broken: bool


def trouble_of(gpu: int, xid: int) -> GpuTrouble | None:
    """The error that an Xid reports; None if a program caused it."""
    if xid in _PROGRAMS:
        return None
    words = _BROKEN.get(xid) or _PASSING.get(xid) or "see NVIDIA's list of them"
    return GpuTrouble(gpu, xid, f"Xid {xid} of GPU {gpu}: {words}", xid in _BROKEN)


class _Nvml:
    """The GPUs of this node by `pynvml`, which is nvidia-ml-py."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml
        pynvml.nvmlInit()
        numbers = range(pynvml.nvmlDeviceGetCount())
        self._gpus = {n: pynvml.nvmlDeviceGetHandleByIndex(n) for n in numbers}
        self._ids = {pynvml.nvmlDeviceGetUUID(gpu): n for n, gpu in self._gpus.items()}
        self._events = pynvml.nvmlEventSetCreate()
        for gpu in self._gpus.values():
            with suppress(pynvml.NVMLError):  # one that has none: only its health is looked at
                wanted = pynvml.nvmlEventTypeXidCriticalError
                pynvml.nvmlDeviceRegisterEvents(gpu, wanted, self._events)
        self._known: set[GpuTrouble] = set()

    def wait(self, seconds: float) -> GpuTrouble | None:
        """The error of the next Xid within `seconds`."""
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        number = self._ids.get(nvml.nvmlDeviceGetUUID(event.device))
        return None if number is None else trouble_of(number, int(event.eventData))

    def look(self) -> Iterator[GpuTrouble]:
        """New health problems."""
        for number, gpu in self._gpus.items():
            for found in self._find_troubles(number, gpu):
                if found not in self._known:
                    self._known.add(found)
                    yield found

    def _find_troubles(self, number: int, gpu: object) -> Iterator[GpuTrouble]:
        nvml = self._nvml
        try:
            _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                yield GpuTrouble(number, 0, f"GPU {number} does not answer any more", True)
            return  # most cannot tell
        if failed:
            yield GpuTrouble(number, 0, f"GPU {number}: {_BROKEN[64]}", True)
        elif pending:
            yield GpuTrouble(number, 0, f"GPU {number}: {_PASSING[63]}", False)


def watch(nvml: _Nvml, tell: Callable[[GpuTrouble], None]) -> None:
    """Report errors for ever."""
    looked_at = -HEALTH_EVERY
    while True:
        if time.monotonic() - looked_at >= HEALTH_EVERY:
            looked_at = time.monotonic()
            for found in nvml.look():
                tell(found)
        if (event := nvml.wait(HEALTH_EVERY / 10)) is not None:
            tell(event)


def main(parent: int) -> None:
    follow_parent(parent, signal.SIGKILL)
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return
    try:
        watch(_Nvml(nvml), lambda trouble: print(json.dumps(asdict(trouble)), flush=True))
    except nvml.NVMLError as error:
        sys.exit(str(error))


class GpuWatch:
    """Runs this module as a process if the `driver` exists, and calls `hear` with its reports, in a
    thread of its own."""

    def __init__(self, hear: Callable[[GpuTrouble], None], driver: Path = DRIVER) -> None:
        self._hear, self._driver = hear, driver
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._driver.exists() and not self.alive():
            self._thread = start_thread("GPUs", self._follow)

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _follow(self) -> None:
        """Start the process and follow it. The thread must outlive it: it is killed with the thread
        that started it."""
        command = [sys.executable, *SAFE_MODULE, __name__, str(os.getpid())]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        try:
            with subprocess.Popen(
                command, stdin=nothing, stdout=pipe, stderr=pipe, text=True
            ) as self._process:
                assert self._process.stdout is not None
                assert self._process.stderr is not None
                for line in self._process.stdout:
                    self._hear(GpuTrouble(**json.loads(line)))
                if complaints := self._process.stderr.read().strip():
                    reason = complaints.splitlines()[-1]
                    logger().warning("the GPUs are watched no longer", reason=reason)
        except (OSError, ValueError, TypeError) as error:
            logger().warning("the GPUs are not watched", reason=str(error))


if __name__ == "__main__":
    main(int(sys.argv[1]))
