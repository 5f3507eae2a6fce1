"""Whatever becomes of the terminal, or of what the output is piped to: nothing is lost with it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness import KEMPNER, Run, drills, wait_until

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(300)

ENDLESS = "--train.max_steps=100000"


@dataclass
class Terminal:
    """A terminal with a session of its own in it, which runs a command of the shell."""

    master: int
    shell: subprocess.Popen[bytes]
    shown: bytearray = field(default_factory=bytearray)
    closed: bool = False

    def look(self) -> bytes:
        """All that was shown until now."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.master, 65536):
                self.shown += part
        return bytes(self.shown)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def close(self) -> None:
        """As somebody who closes the window: the kernel hangs up."""
        if not self.closed:
            self.closed = True
            os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Callable[[str], Terminal]]:
    """Runs a command of the shell in a terminal."""
    opened: list[Terminal] = []

    def open_terminal(command: str) -> Terminal:
        master, slave = pty.openpty()

        def take_terminal() -> None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        shell = subprocess.Popen(
            ["bash", "-c", command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        )
        os.close(slave)
        os.set_blocking(master, False)
        opened.append(Terminal(master, shell))
        return opened[-1]

    yield open_terminal
    for one in opened:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.shell.pid, signal.SIGKILL)
        one.shell.wait()
        one.close()


CTRL_C, CTRL_S, CTRL_Q = b"\x03", b"\x13", b"\x11"


def supervise(run: Run) -> str:
    """The command, for a shell."""
    return " ".join([*KEMPNER, "supervise", str(run.config), ENDLESS])


def supervisor(run: Run) -> int:
    """The process id of the last supervisor, once its first step is made."""
    attempt = len(run.events("stopped")) + 1
    wait_until(lambda: any(line["attempt"] == attempt for line in run.metrics()), "a step")
    newest = max((run.record.path / "supervisors").iterdir(), key=lambda path: int(path.name))
    return int(json.loads(newest.read_text().partition("\n")[2])["pid"])


def rank_of(run: Run, attempt: int) -> int:
    """The process id of the rank that has made a step."""
    lines = read_lines(run.record.log(attempt, 0))
    return next(int(line["pid"]) for line in lines if line["event"] == "ready")


def more_steps(run: Run, terminal: Terminal | None = None) -> None:
    """Wait until training has gone on for some steps from here."""
    goal = max(run.steps()) + 20
    wait_until(lambda: (terminal and terminal.look(), max(run.steps()) >= goal)[1], f"step {goal}")


def expect_stop(run: Run, code: Path) -> None:
    """The run left with 75, as the shell has written to `code`, and what it had done is
    committed.
    """
    assert int(wait_until(lambda: code.exists() and code.read_text(), "the end")) == 75
    assert run.latest() == max(run.steps())
    assert run.events("stopped")[-1]["step"] == run.latest()
    assert [e["code"] for e in run.events("attempt_ended")] == [75] * len(run.events("stopped"))
    for line in run.record.metrics.read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize(
    "shell",
    [
        "{} >/dev/full 2>/dev/full; echo $? >{code}",
        "({}; echo $? >{code}) 2>&1 | head -1",
        *drills("{} >&- 2>/dev/full; echo $? >{code}"),
    ],
)
def test_outputs_that_take_nothing(run: Run, tmp_path: Path, shell: str) -> None:
    code = tmp_path / "code"
    command = shell.format(supervise(run), code=code)
    with subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True
    ):
        os.kill(supervisor(run), signal.SIGTERM)
        expect_stop(run, code)
    log = run.record.supervisor_log(1).read_text()
    assert "SIGTERM: stopping after this step" in log
    assert "output could not be shown" in log


def test_ctrl_c_that_ends_tee_first(
    run: Run, terminal: Callable[[str], Terminal], tmp_path: Path
) -> None:
    code = tmp_path / "code"
    command = f"{supervise(run)} 2>&1 | tee {tmp_path}/log; echo ${{PIPESTATUS[0]}} >{code}"
    here = terminal(f"trap : INT; {command}")
    supervisor(run)
    here.type(CTRL_C)
    expect_stop(run, code)
    assert run.events("stopped")[-1]["reason"] == "interrupt"


def test_a_closed_terminal_and_one_that_nohup_does_not_need(
    run: Run, terminal: Callable[[str], Terminal], tmp_path: Path
) -> None:
    code = tmp_path / "code"
    # The outer shell dies of it; the inner one stays to see how the command ends.
    here = terminal(f"(trap : HUP; {supervise(run)}; echo $? >{code}); true")
    supervisor(run)
    here.look()
    here.close()
    expect_stop(run, code)
    code.unlink()
    command = f"nohup {supervise(run)} >{tmp_path}/log 2>&1"
    here = terminal(f"(trap : HUP; {command}; echo $? >{code}); true")
    daemon = supervisor(run)
    here.close()
    os.kill(daemon, signal.SIGHUP)
    os.kill(rank_of(run, attempt=2), signal.SIGHUP)
    more_steps(run)
    os.kill(daemon, signal.SIGTERM)
    expect_stop(run, code)


def test_a_terminal_that_is_stopped(
    run: Run, terminal: Callable[[str], Terminal], tmp_path: Path
) -> None:
    """It shows nothing, and whoever writes to it has to wait: but not training, nor its end."""
    code = tmp_path / "code"
    here = terminal(f"{supervise(run)}; echo $? >{code}")
    daemon = supervisor(run)
    wait_until(lambda: b"tokens/s" in here.look(), "the progress bar")
    here.type(CTRL_S)
    more_steps(run, here)
    at, shown = max(run.steps()), len(here.look())
    here.type(CTRL_Q)
    wait_until(lambda: newest_step(here.look()[shown:]) >= at, "the bar to go on")
    here.type(CTRL_S)
    os.kill(daemon, signal.SIGTERM)
    expect_stop(run, code)


def newest_step(shown: bytes) -> int:
    """The last step that the progress bar shows."""
    return max((int(step) for step in re.findall(rb"step (\d+)/", shown)), default=0)
