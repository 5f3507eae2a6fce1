"""Whatever becomes of the terminal, or of what the output is piped to: nothing is lost with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import KEMPNER, Run, drills, wait_until
from terminal import CTRL_C, CTRL_Q, CTRL_S, CTRL_Z, ENTER, Terminal

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(300)

ENDLESS = "--train.max_steps=100000"


@pytest.fixture
def terminal() -> Iterator[Callable[[str], Terminal]]:
    """Runs a command of the shell in a terminal."""
    opened: list[Terminal] = []

    def open_terminal(command: str) -> Terminal:
        opened.append(Terminal.open(command))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.end()


def supervise(run: Run) -> str:
    """The command, for a shell."""
    return shlex.join([*KEMPNER, "supervise", str(run.config), ENDLESS])


def supervisor(run: Run) -> int:
    """The process id of the last supervisor, once its first step is made."""
    attempt = len(run.events("stopped")) + 1
    wait_until(lambda: any(line["attempt"] == attempt for line in run.metrics()), "a step")
    newest = max((run.record.path / "supervisors").iterdir(), key=lambda path: int(path.name))
    return int(json.loads(newest.read_text().partition("\n")[2])["pid"])


def rank_of(run: Run, attempt: int, rank: int = 0) -> int:
    """The process id of a rank that has made a step."""
    lines = read_lines(run.record.log(attempt, rank))
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
        "{} >/dev/full 2>/dev/full; echo $? >'{code}'",
        "({}; echo $? >'{code}') 2>&1 | head -1",
        *drills("{} >&- 2>/dev/full; echo $? >'{code}'"),
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
    command = f"{supervise(run)} 2>&1 | tee '{tmp_path}/log'; echo ${{PIPESTATUS[0]}} >'{code}'"
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
    here = terminal(f"(trap : HUP; {supervise(run)}; echo $? >'{code}'); true")
    supervisor(run)
    here.look()
    here.close()
    expect_stop(run, code)
    code.unlink()
    command = f"nohup {supervise(run)} >'{tmp_path}/log' 2>&1"
    here = terminal(f"(trap : HUP; {command}; echo $? >'{code}'); true")
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
    """It shows nothing, and a process that writes to it waits: but not training, nor its end."""
    code = tmp_path / "code"
    here = terminal(f"export NO_COLOR=1 TERM=xterm-256color; {supervise(run)}; echo $? >'{code}'")
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
    assert not COLOUR.search(here.look())


def newest_step(shown: bytes) -> int:
    """The last step that the progress bar shows."""
    return max((int(step) for step in re.findall(rb"step (\d+)/", shown)), default=0)


def test_a_narrow_terminal_a_pause_another_size_and_two_ctrl_c(
    run: Run, terminal: Callable[[str], Terminal], tmp_path: Path
) -> None:
    """Ctrl-Z stops all ranks, `fg` continues them; what is left is a terminal in order."""
    code, paused = tmp_path / "code", tmp_path / "paused"
    here = terminal(
        f"stty columns 40; export TERM=xterm-256color; set -m; {supervise(run)} --nproc 2; "
        f"touch '{paused}'; read; fg; echo $? >'{code}'"
    )
    daemon = supervisor(run)
    ranks = [rank_of(run, 1, rank) for rank in (0, 1)]
    await_line(here, FITS)
    first, *others = (line for line in here.lines() if line)
    assert first == f"run directory: {run.record.path}"
    assert others[0] == "starting 2 ranks: importing torch"

    here.type(CTRL_Z)
    wait_until(paused.exists, "the shell to go on")
    wait_until(lambda: all(state(pid) == "T" for pid in (daemon, *ranks)), "all to stand still")
    here.type(ENTER)
    more_steps(run, here)
    assert run.attempt() == 1
    assert not run.events("hang")

    here.resize(100)
    await_line(here, WIDE)
    assert COLOUR.search(here.look())
    os.kill(ranks[1], signal.SIGSTOP)  # so that there is no vote, and the stop takes long
    here.type(CTRL_C)
    stopping = "kempner: SIGINT: stopping after this step, with a checkpoint"
    wait_until(lambda: stopping in here.lines(), "the first one to be noticed")
    here.type(CTRL_C)
    assert int(wait_until(lambda: code.exists() and code.read_text(), "the end")) == 130
    wait_until(lambda: not any(map(lives, ranks)), "the ranks to be gone")
    assert "kempner: exited at once on the second Ctrl-C; the last commit is intact" in here.lines()
    assert HIDE_CURSOR not in here.look()


def await_line(here: Terminal, form: re.Pattern[str]) -> None:
    """Wait until a whole line has this form; the last lines are shown if none has."""
    try:
        wait_until(lambda: any(form.fullmatch(line) for line in here.lines()), form.pattern)
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *map(repr, here.lines()[-20:])])) from None


FITS = re.compile(r"step \d+/100000 +(loss [\d.]+ )?ETA (\d+ d )?[\d:]+( h)?")
WIDE = re.compile(r".*step \d+/100000 .{10,} loss [\d.]+ [\d,]+ tokens/s ETA .*")
COLOUR = re.compile(rb"\x1b\[(\d+;)*3\d")
HIDE_CURSOR = b"\x1b[?25l"


def state(pid: int) -> str:
    """A process's state in one letter (proc(5)): T for one that was stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def lives(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        return state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
