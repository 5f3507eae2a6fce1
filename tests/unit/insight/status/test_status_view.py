"""The view of a run fits every terminal, follows the run, and leaves without a trace of Ctrl-C."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from harness import PYTHON, ROOT, wait_until
from rich.console import Console
from terminal import CTRL_C, Terminal

from kempner.cli.entry import main
from kempner.cli.insight import status_view
from kempner.cli.insight.status_view import sparkline, view
from kempner.insight.run_reader import CheckpointFacts, LiveState, Metrics, RankPlace, RunFacts
from kempner.insight.status.job import JobStatus, Restarts
from kempner.insight.status.summary import Status, summarise
from kempner.run.process.exit_codes import CannotReadError, ExitCode
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.gave_up import GaveUp
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import Lease
from kempner.run.record.run_dir import RunDirectory

NOW = 1.7e9


def event(name: str, ago: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": NOW - ago, "attempt": 2, **fields}


BEGUN = [
    {**event("attempt_started", 900, ranks=16384, nodes="node[0001-2048]"), "attempt": 1},
    {
        **event("attempt_ended", 800, code=1, reason="rank 4211 was killed by SIGKILL"),
        "attempt": 1,
        "culprit": 4211,
        "exits": {},
    },
    event("attempt_started", 700, ranks=16384, job="4711", nodes="node[0001-2048]"),
    event("ready_to_train", 600, step=0, device="cuda:0", reached={}),
]
STEPS = [
    {"step": n, "loss": 2 - n / 1000, "tokens": n * 1e6, "tokens_per_second": 1e6, "mfu": 0.4}
    | {"time": NOW - 500 + n, "attempt": 2}
    for n in range(1, 499)
]


def long_run(step: int, **facts: Any) -> Status:
    ranks = [RankPlace(n, step - n % 3, "step", 100.0, 10.0) for n in range(16384)]
    known = {"history": RunHistory(BEGUN), "live": LiveState(True, 2, ranks)}
    known |= {"metrics": Metrics(STEPS[:step], 1000)}
    known |= {"checkpoint": CheckpointFacts(400, NOW - 90)}
    return summarise(RunFacts(NOW, **{**known, **facts}))


JOB = JobStatus("4711", "RUNNING", "node[0001-2048]", Restarts(1, 1, 2), ends_at=NOW + 100)
STORAGE = "/scratch/somebody/runs/7b/checkpoints/.step-00000500.a2-9f1c22ab: Stale file handle"
STUCK = RankPlace(0, 498, "save", storage=STORAGE)
STATES = {
    "training": long_run(498, job=JOB),
    "waiting for storage": long_run(
        498, live=LiveState(True, 2, [RankPlace(0, 498, "save", storage=STORAGE)])
    ),
    "given up": long_run(498, gave_up=GaveUp(ExitCode.CRASHED, "the same step failed twice")),
    "ended without a message": long_run(498, live=LiveState(False, 2)),
    "not started": summarise(RunFacts(NOW)),
}


def drawn(name: str, columns: int, **console: Any) -> str:
    output = io.StringIO()
    screen = Console(file=output, width=columns, highlight=False, **console)
    screen.print(view([("runs/7b", STATES[name])], together=False, columns=columns))
    screen.print(view([("runs/7b", s) for s in STATES.values()], together=True, columns=columns))
    return output.getvalue()


@pytest.mark.parametrize("columns", [36, 80, 120, 250])
@pytest.mark.parametrize("name", STATES)
def test_every_state_fits_every_terminal(name: str, columns: int) -> None:
    lines = drawn(name, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert f"● {name}" in lines[1] or f"● {name[:25]}" in lines[1]
    words = re.sub(r"[^\w:./-]+", " ", " ".join(lines))
    if name == "training":
        told = ("rank 4211 was killed by SIGKILL", "THEY DISAGREE", "4711 RUNNING", "40.0")
        assert [part for part in told if part not in words] == []
    if name == "waiting for storage":
        assert STORAGE.replace(" ", "") in words.replace(" ", "")


@pytest.mark.parametrize(("rows", "lists"), [(40, 2), (20, 1), (16, 0)])
def test_a_low_terminal_shows_what_is_needed_most(rows: int, lists: int) -> None:
    output = io.StringIO()
    screen = Console(file=output, width=100, height=rows, force_terminal=True, no_color=True)
    looks = Scripted(status_view.Look([("runs/7b", STATES["training"])], at=time.monotonic()))
    screen.print(status_view.View(looks, together=False))  # type: ignore[arg-type]
    lines = output.getvalue().splitlines()
    assert len(lines) <= rows
    assert "Ctrl-C leaves" in lines[-1]
    assert ["4211" in output.getvalue(), "5,462 ranks" in output.getvalue()] == [
        lists > 0,
        lists > 1,
    ]


def test_no_colour_is_needed() -> None:
    assert "\x1b" not in drawn("training", 100)
    assert "\x1b[" in drawn("training", 100, force_terminal=True, color_system="256")
    plain = drawn("training", 100, force_terminal=True, no_color=True)
    assert not re.search(r"\x1b\[[\d;]*3\d", plain)


@pytest.mark.parametrize(
    ("values", "columns", "from_zero", "shown"),
    [
        ([1, 2, 3], 9, False, "▁▄█"),
        ([5, 5, 5], 9, False, "▁▁▁"),
        ([4, 4, 2], 9, True, "██▄"),
        ([4, 4, 3.9], 9, True, ""),
        ([0, 0, 4, 4, 8, 8], 3, False, "▁▄█"),
    ],
)
def test_a_curve_in_a_line(values: list[float], columns: int, from_zero: bool, shown: str) -> None:
    found = sparkline(values, columns, from_zero=from_zero)
    assert found.replace("▅", "▄") == shown


class Scripted:
    """In place of a `Watcher`: one look after the other."""

    def __init__(self, *looks: status_view.Look) -> None:
        self._looks = list(looks)

    @property
    def last(self) -> status_view.Look:
        return self._looks[0]

    def wait(self, seconds: float) -> bool:
        del self._looks[0]
        return True


def test_without_a_terminal_each_change_is_a_line_until_the_run_is_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = long_run(498, history=RunHistory([*BEGUN, event("completed", 1, step=498)]))
    gone = CannotReadError("the ledger cannot be read: Stale file handle")
    made = [
        status_view.Look([("runs/7b", status)]) for status in (*map(long_run, (400, 450)), done)
    ]
    looks = (
        made[0],
        made[0],
        made[1],
        status_view.Look(made[1].found, error=gone),
        made[1],
        made[2],
    )
    status_view.print_lines(Scripted(*looks))  # type: ignore[arg-type]
    lines = [line[10:] for line in capsys.readouterr().out.splitlines()]
    assert [line[:18] for line in lines[:2]] == 2 * ["runs/7b:  training"]
    assert ["step 400/1000" in lines[0], "step 450/1000" in lines[1]] == [True, True]
    assert lines[2:4] == [str(gone), "can be read again"]
    assert lines[4].startswith("runs/7b:  completed")
    assert len(lines) == 5


def live_run(folder: Path) -> tuple[RunDirectory, Lease]:
    """A run of one rank that this process seems to supervise."""
    run = RunDirectory(folder / "runs" / "mine")
    begin_attempt(run)
    run.config.write_text("[train]\nmax_steps = 90\n")
    now = time.time()
    lines = [
        {"event": "attempt_started", "ranks": 1},
        {"event": "ready_to_train", "step": 0, "device": "cpu", "reached": {}},
    ]
    run.ledger.write_text(
        "".join(json.dumps({"time": now, "attempt": 1, **line}) + "\n" for line in lines)
    )
    log(run, 7)
    return run, Lease.acquire(run, lasts=45.0)


def log(run: RunDirectory, step: int) -> None:
    with run.metrics.open("a") as metrics:
        entry = {"step": step, "attempt": 1, "loss": 2.0, "time": time.time(), "tokens": step}
        metrics.write(json.dumps(entry) + "\n")


def test_in_a_terminal_the_view_follows_the_run_and_its_size(tmp_path: Path) -> None:
    run, lease = live_run(tmp_path)
    place = {"PYTHONPATH": str(ROOT)}
    command = f"{PYTHON} -m kempner status runs/mine --watch; echo left with $?"
    terminal = Terminal.open(command, cwd=tmp_path, environ=place)

    def shows(words: str) -> bool:
        return any(words in line for line in terminal.lines())

    try:
        wait_until(lambda: shows("7 / 90"), "the first step", 60)
        log(run, 8)
        wait_until(lambda: shows("8 / 90"), "the next step", 60)
        del terminal.shown[:]
        terminal.resize(60)
        # A frame begins at the top of the screen, right after the end of the one before.
        narrow = lambda: any(re.search(r"╭[^╭╮]{58}╮", line) for line in terminal.lines())  # noqa: E731
        wait_until(narrow, "a narrow view", 60)
        run.path.rename(tmp_path / "gone")
        wait_until(lambda: shows("cannot be read"), "what is wrong", 60)
        terminal.type(CTRL_C)
        wait_until(lambda: shows("left with 0"), "the end", 60)
        after = terminal.look().decode(errors="replace").rpartition("\x1b[?1049l")[2]
        assert "8 / 90" in after  # what was seen last stays on the screen
        assert "Traceback" not in after
    finally:
        terminal.end()
        (tmp_path / "gone").rename(run.path)
        lease.release()


def test_all_runs_of_a_project_and_their_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lease = live_run(tmp_path)
    over = RunDirectory(tmp_path / "runs" / "over")
    over.path.mkdir()
    over.ledger.write_text(json.dumps(event("completed", 5, step=3)) + "\n")
    monkeypatch.chdir(tmp_path)
    first, second = call(capsys, "status").splitlines()
    assert first.startswith("runs/mine:  training  step 7/90  loss 2.0000")
    assert second.startswith("runs/over:  completed")
    mine, other = json.loads(call(capsys, "status", "--json"))
    assert (mine["run"], mine["state"], mine["step"]) == ("runs/mine", "training", 7)
    assert (mine["attempt"]["number"], other["state"]) == (1, "completed")
    assert json.loads(call(capsys, "status", "runs/mine", "--json"))[0].keys() == mine.keys()
    lease.release()
    assert run.ledger.is_file()


def test_the_keys_of_the_json_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "status.md").read_text()
    table = page[page.index("## JSON") :]
    listed = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert listed == ["run", *STATES["training"].to_json()]


def test_what_cannot_be_shown_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (["status"], "there is no run below runs"),
        (["status", "."], "is not a run: it has no ledger.jsonl"),
        (["status", "--json", "--watch"], "exclude each other"),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == ExitCode.USAGE
        assert words in capsys.readouterr().err


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    return capsys.readouterr().out
