"""A job whose ranks stop near its end, as a program that Slurm runs as its batch process. Between
the ranks' end and the requeue it counts the supervisor's calls into the system, and may have one of
them hang or fail.

    batch_job.py FOLDER SECONDS STORAGE plain|slots [CALL HOW]

SECONDS are left of the job's time when the supervisor begins, with `slots` when the rank has
trained. In FOLDER a fake scontrol keeps the
job (`fake_slurm.py`), and `calls` gets the calls: each with who makes it, and for which line of
kempner's. The run directory is in STORAGE. With `slots` the rank leaves a step in memory, which is
to be salvaged. HOW is `hang`, `fail`, `kill`, `descriptors`, `memory`, `oom`, or `wait`: until the
test has done something to storage or limits, and has made the file `done`.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from types import FrameType, SimpleNamespace
from typing import Any

os.environ["SLURM_TASK_PID"] = str(os.getpid())  # which only Slurm knows beforehand

from kempner.supervisor.watchdog.keeper import split_batch

if __name__ == "__main__":
    split_batch(os.environ)

import errno
from pathlib import Path

from fake_slurm import job_ends

from kempner.cli import entry
from kempner.cluster.slurm import scontrol
from kempner.config.sections import Config
from kempner.run.process.signals import inbox
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor import daemon
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.local import this_machine
from kempner.supervisor.slurm.job_monitor import JobMonitor

RANK = Path(__file__).with_name("leaves_step.py")

OF_THE_SYSTEM = ("posix", "_io", "io", "_posixsubprocess", "_socket", "fcntl", "select")

HARMLESS = ("fspath", "getpid", "fileno", "isatty", "WIFSTOPPED", "waitstatus_to_exitcode")
"""Calls that concern this process alone."""


class Tracer:
    """Sees the calls of all threads that do what follows the ranks' end."""

    def __init__(self, folder: Path, wanted: str, how: str) -> None:
        self._folder, self._wanted, self._how = folder, wanted, how
        self._calls: dict[str, None] = {}
        self.armed = False
        threading.setprofile(self.look)  # before any thread begins
        sys.setprofile(self.look)

    def look(self, frame: FrameType, event: str, call: Any) -> None:
        if not self.armed or event != "c_call":
            return
        if call.__name__ in HARMLESS or _module(call) not in OF_THE_SYSTEM:
            return
        name = f"{_module(call)}.{call.__name__} in {_caller(frame)}"
        if name != self._wanted or name in self._calls:
            self._calls[name] = None
            return
        self._calls[name] = None
        (self._folder / "hit").touch()
        self._befall()

    def _befall(self) -> None:
        match self._how:
            case "fail":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "descriptors":  # there are none any more
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
            case "memory":
                resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
            case "oom":
                held = [os.urandom(1 << 20)]
                while True:
                    held.append(bytes(reversed(held[-1])) * 16)
            case "wait":
                while not (self._folder / "done").exists():
                    time.sleep(0.02)
            case _:
                while True:
                    time.sleep(1000.0)

    def disarm(self) -> None:
        self.armed = False
        (self._folder / "calls").write_text("\n".join(self._calls))


def _module(call: Any) -> str:
    return str(
        getattr(call, "__module__", None) or type(getattr(call, "__self__", None)).__module__
    )


def _caller(frame: FrameType) -> str:
    """The function, and the line of kempner's on whose behalf it runs."""
    ours: FrameType | None = frame
    while ours is not None and not ours.f_globals.get("__name__", "").startswith("kempner."):
        ours = ours.f_back
    said = frame.f_code.co_qualname
    if ours is None:
        return said
    return f"{said} for {ours.f_globals['__name__']}:{ours.f_lineno}"


def run(folder: Path, seconds: float, storage: Path, slots: bool, tracer: Tracer) -> int:
    requeue, kill = scontrol.requeue, Launcher.kill

    def ends(self: Launcher) -> None:
        tracer.armed = True
        kill(self)

    def asks(job: str) -> None:
        requeue(job)
        tracer.disarm()

    Launcher.kill = ends  # type: ignore[method-assign]
    scontrol.requeue = asks
    inbox().install()
    directory = RunDirectory(storage / "run")
    sections = {"run": {"name": "run", "dir": str(storage)}, "checkpoint": {"in_memory": slots}}
    config = Config.model_validate(sections)
    program = Program.of_user(["sh", "-c", "sleep 0.1; exit 75"])
    if slots:
        daemon.check_ready = lambda *_: SimpleNamespace(warnings=())  # type: ignore[assignment]
        rank = (sys.executable, str(RANK), str(folder), str(seconds))
        program = Program(rank, ours=True)
        directory.checkpoints.mkdir(parents=True)
    else:
        job_ends(folder, seconds)
    monitor = JobMonitor("7", batch=True)
    return daemon.supervise(
        directory, Launcher(*this_machine(directory, 1)), program, config, inbox(), monitor
    )


def main() -> None:
    folder, seconds, storage = Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    wanted, how = (*sys.argv[5:], "", "")[:2]
    tracer, slots = Tracer(folder, wanted, how), sys.argv[4] == "slots"
    entry._run = lambda given: run(folder, seconds, storage, slots, tracer)  # type: ignore[assignment, return-value]
    entry._run_and_leave([])


if __name__ == "__main__":
    main()
