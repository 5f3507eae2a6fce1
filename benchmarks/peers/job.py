"""One start of a peer's program, as a scheduler makes it: processes, a warning, and an end.

The processes of a job are found by a variable in their environment, since launchers give their
workers sessions of their own. The scheduler of a real cluster is played: `scontrol` on the path
notes that a requeue was asked for.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from scenarios import How

GRACE = 45.0
"""Seconds from the warning to the end of the job."""
ALLOWED = 150.0
"""Seconds for a start that is not warned."""
AFTER = {How.KILL: ALLOWED, How.HANG: 90.0}
"""Seconds after an interruption that is no warning: it may heal within the job."""
KILL_WAIT = 10.0
"""Seconds from a requeue's SIGTERM to its SIGKILL."""
APART = 0.5


@dataclass(frozen=True)
class Start:
    """What is started: `commands` are what the scheduler starts, each with variables of its own."""

    folder: Path
    number: int
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]
    variables: Mapping[str, str]
    warning: signal.Signals = signal.SIGTERM
    to_ranks: bool = False


@dataclass
class Ended:
    """How a start ended: the exit codes of what the scheduler had started."""

    codes: list[int] = field(default_factory=list)
    hung: bool = False
    requeue_asked: bool = False
    left_over: int = 0


def processes(folder: Path) -> list[psutil.Process]:
    """All that carry the mark of this run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PEERS_FOLDER") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


class Job:
    """A start that is under way."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.ended = Ended()
        self._out = open(start.folder / f"start-{start.number}.out", "wb")  # noqa: SIM115
        (start.folder / "requeued").unlink(missing_ok=True)
        self._leaders = [self._begin(*command) for command in start.commands]

    def _begin(
        self, command: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
        }
        environment |= {**self.start.variables, **variables}
        return subprocess.Popen(
            command,
            cwd=self.start.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._out,
            start_new_session=True,
        )

    def wait(self, how: How) -> Ended:
        """Until it ends, the job's time is over, or it has itself requeued."""
        asked = self.start.folder / "interrupt-now"
        done = self.start.folder / f"interrupted-{self.start.number}"
        pending, end = how is not How.NOT, time.monotonic() + ALLOWED
        while any(leader.poll() is None for leader in self._leaders):
            time.sleep(0.02)
            if pending and asked.exists() and asked.read_text():
                self._interrupt(how, int(asked.read_text()), done)
                pending = False
                end = time.monotonic() + AFTER.get(how, GRACE)
            if not self.ended.requeue_asked and (self.start.folder / "requeued").exists():
                self.ended.requeue_asked = True
                self._send(signal.SIGTERM, [leader.pid for leader in self._leaders])
                end = time.monotonic() + KILL_WAIT
            if time.monotonic() > end:
                self.ended.hung = not self.ended.requeue_asked
                break
        self._clear()
        return self.ended

    def _interrupt(self, how: How, rank: int, done: Path) -> None:
        """What is asked for by the process `rank`; `done` tells it to go on."""
        pids = [process.pid for process in processes(self.start.folder)]
        match how:
            case How.KILL:
                self._send(signal.SIGKILL, [rank])
            case How.HANG:
                return  # the rank waits for ever
            case How.EVERY_PROCESS:
                self._send(self.start.warning, pids)
            case How.APART:
                self._apart(done)
            case _:
                self._send(self.start.warning, self._tasks())
        done.touch()

    def _tasks(self) -> list[int]:
        """Whom the scheduler warns: what it has started, where that passes a signal on."""
        return self._ranks() if self.start.to_ranks else [leader.pid for leader in self._leaders]

    def _ranks(self) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.start.folder.glob("rank-*.pid"))]

    def _apart(self, done: Path) -> None:
        """One leader after the other, or where there is one leader its ranks; training goes on."""
        pids = self._tasks()
        for pid in pids if len(pids) > 1 else self._ranks():
            self._send(self.start.warning, [pid])
            done.touch()
            time.sleep(APART)

    @staticmethod
    def _send(number: signal.Signals, pids: Sequence[int]) -> None:
        if pids:  # one command: a shell's signals come together
            command = shlex.join(["kill", f"-{number.value}", *map(str, pids)])
            subprocess.run(["sh", "-c", f"{command} 2>/dev/null"], check=False)

    def _clear(self) -> None:
        """As the scheduler does at the end of a job."""
        left = processes(self.start.folder)
        self.ended.left_over = 0 if self.ended.hung else len(left)
        while left:
            self._send(signal.SIGKILL, [process.pid for process in left])
            time.sleep(0.1)
            left = processes(self.start.folder)
        self.ended.codes = [leader.wait() for leader in self._leaders]
        self._out.close()
