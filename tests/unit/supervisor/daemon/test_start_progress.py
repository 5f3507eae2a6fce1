"""What is said between the launch of the ranks and their first step."""

from __future__ import annotations

import errno
import subprocess
import sys

import psutil
import pytest

from kempner.run.control.protocol import Phase
from kempner.supervisor.control import rank_connections
from kempner.supervisor.control.rank_connections import StartProgress, describe_start, written_below


@pytest.mark.parametrize(
    ("phases", "last_step", "line"),
    [
        ([], None, "starting 2 ranks: importing torch"),
        ([Phase.LOAD], None, "starting 2 ranks: importing torch"),
        ([Phase.START, Phase.RENDEZVOUS], None, "2 ranks: importing torch"),
        ([Phase.RENDEZVOUS, Phase.LOAD], None, "2 ranks: meeting"),
        ([Phase.LOAD, Phase.LOAD], None, "2 ranks: building the model"),
        ([Phase.LOAD, Phase.LOAD], 300, "2 ranks: loading step 300"),
        ([Phase.LOAD, Phase.COMPILE], 300, ""),
        ([Phase.STEP], None, ""),
    ],
)
def test_the_slowest_rank_is_spoken_of(
    phases: list[Phase], last_step: int | None, line: str
) -> None:
    assert describe_start(2, phases, last_step) == line


def test_a_file_gets_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(10))
    progress = StartProgress(1, None, ours=True, now=lambda: float(next(clock)))
    for phase in (Phase.START, Phase.START, Phase.LOAD, Phase.STEP, Phase.LOAD):
        progress.update([phase])
    progress.close(clean=True)
    lines = [
        "starting 1 rank: importing torch",
        "1 rank: importing torch",
        "1 rank: building the model",
    ]
    assert capsys.readouterr().out.splitlines() == lines
    other = StartProgress(2, None, False, now=lambda: float(next(clock)), written=lambda: 0)
    other.update([])
    other.update([Phase.START, Phase.START])
    assert capsys.readouterr().out == "starting 2 ranks\n"


def test_a_terminal_is_told_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(rank_connections, "can_rewrite", lambda: True)
    monkeypatch.setattr(rank_connections, "show_for_now", shown.append)
    clock = iter([0.0, 0.1, 0.6, 1.2, 1.7, 2.3])
    progress = StartProgress(1, None, ours=True, now=lambda: next(clock))
    for _ in range(4):
        progress.update([Phase.START])
    began = "starting 1 rank: importing torch"
    assert shown == [began, *(f"1 rank: importing torch{t}" for t in ("", ", 1 s", ", 2 s"))]


ANEW = "\x1b[1A\r\x1b[2K"


def test_a_program_of_ones_own_is_said_to_start_and_keeps_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its line is made anew where nothing was written since, and said again below where that has
    paused, or where its ranks have come further; a few times at most."""
    monkeypatch.setattr(rank_connections, "can_rewrite", lambda: True)
    looks: list[tuple[float, int, list[Phase]]] = [
        (0.5, 0, []),
        (1.0, 0, []),  # anew
        (2.0, 30, []),  # it prints
        (3.0, 30, []),  # and pauses: below
        (4.0, 30, []),  # anew
        (5.0, 60, []),
        (6.0, 90, []),  # it goes on printing
        (7.0, 95, [Phase.LOAD] * 2),  # below
        (8.0, 99, [Phase.STEP] * 2),
        (9.0, 99, [Phase.LOAD] * 2),
    ]
    now, written = 0.0, 0
    progress = StartProgress(2, None, False, now=lambda: now, written=lambda: written)
    for now, written, phases in looks:  # noqa: B007
        progress.update(phases)
    assert capsys.readouterr().out.rstrip().split("\n") == [
        "starting 2 ranks",
        f"{ANEW}starting 2 ranks, 1 s",
        "starting 2 ranks, 3 s",
        f"{ANEW}starting 2 ranks, 4 s",
        "2 ranks: building the model, 7 s",
    ]


def test_what_prints_for_long_or_cannot_be_looked_into_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_connections, "can_rewrite", lambda: True)
    now, written = 0.0, 0
    progress = StartProgress(1, None, False, now=lambda: now, written=lambda: written)
    for second in range(2, 40):
        now, written = float(second), second // 2
        progress.update([])
    said = capsys.readouterr().out.rstrip().split("\n")
    assert said == [
        "starting 1 rank",
        *(f"starting 1 rank, {seconds} s" for seconds in (3, 5, 7)),
    ]
    unknown = StartProgress(1, None, False, now=lambda: now, written=lambda: None)
    late = StartProgress(1, None, False, now=lambda: now, written=lambda: 0)
    for now in (42.0, 43.0, 120.0):  # noqa: B007
        unknown.update([])
    for now in (121.0, 122.0):  # noqa: B007
        late.update([])
    assert capsys.readouterr().out.splitlines() == ["starting 1 rank", "starting 1 rank"]


def test_what_the_processes_below_have_written_is_counted() -> None:
    before = written_below()
    assert before is not None
    program = "import os, sys; os.write(1, b'x' * 100); sys.stdin.read()"
    command = [sys.executable, "-I", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as below:
        assert below.stdout is not None
        assert below.stdin is not None
        assert len(below.stdout.read(100)) == 100
        assert (written_below() or 0) - before == 96
        below.stdin.close()


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), psutil.AccessDenied()]
)
def test_processes_that_cannot_be_seen_end_no_start(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, "children", fail)
    assert written_below() is None
