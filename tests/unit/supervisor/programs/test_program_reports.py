"""What a program that does not import kempner tells of itself: by files, and by what it prints."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until
from pydantic import ValidationError

from kempner.config.sections import ProgramSection
from kempner.run.control.heartbeat_file import HEARTBEAT_FILE, Heartbeat, parse, write
from kempner.run.control.protocol import Phase
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.program_reports import FileSeen, ProgramReports
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.children import Children
from kempner.supervisor.launchers.rank_output import ChildRank, RecentBytes, StepFinder
from kempner.supervisor.policy.outcome import RankExit


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("120", Heartbeat(120)),
        (" 120 \n", Heartbeat(120)),
        ("120 complete\n", Heartbeat(120, complete=True)),
        ("complete\n", Heartbeat(None, complete=True)),
        ("", None),
        ("-3", None),
        ("1.5", None),
        ("²", None),
        ("12 13", None),
        ("complete 12", None),
        ("9" * 16, None),
    ],
)
def test_a_heartbeat_is_a_step_or_the_word_that_all_is_done(
    text: str, said: Heartbeat | None
) -> None:
    assert parse(text) == said
    if said is not None:
        assert parse(said.text()) == said


def test_a_file_that_makes_no_sense_is_a_sign_of_life_and_keeps_what_was_said() -> None:
    seen = FileSeen(-1, None).after(10, Heartbeat(5, complete=True))
    assert (seen.report().step, seen.report().phase) == (5, Phase.STEP)
    assert seen.after(10, Heartbeat(6)) is seen  # the same moment: read twice
    moved = seen.after(11, None)
    assert (moved.heartbeat, moved.moves) == (Heartbeat(5, complete=True), 2)
    assert moved.after(12, Heartbeat(6)).heartbeat == Heartbeat(6, complete=True)
    quiet = FileSeen(10, None)
    assert quiet.report().phase is Phase.START
    assert quiet.after(11, None).report() != quiet.after(11, None).after(12, None).report()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"progress_pattern": "step [0-9]+"}, "needs a group for the step"),
        ({"progress_pattern": "step ([0-9]+"}, "progress_pattern is no regular expression"),
        ({"done_codes": [0, 75]}, "the exit code 75 is named twice"),
        ({"fail_codes": [256]}, "less than or equal to 255"),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ProgramSection(**given)


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Callable[..., ProgramReports]]:
    made: list[ProgramReports] = []

    def begin(section: ProgramSection | None, size: int = 2) -> ProgramReports:
        run = RunDirectory(tmp_path / "run")
        run.attempt(1).mkdir(parents=True, exist_ok=True)
        made.append(ProgramReports(run, 1, size, section))
        made[-1].start()
        return made[-1]

    yield begin
    for one in made:
        one.close()


def places(reports: ProgramReports) -> dict[int, tuple[int, str]]:
    reports.refresh()
    return {rank: (s.report.step, s.report.phase) for rank, s in reports.reports().items()}


def test_ranks_are_where_their_files_say(
    reports: Callable[..., ProgramReports], tmp_path: Path
) -> None:
    run, seen = RunDirectory(tmp_path / "run"), reports(ProgramSection())
    assert places(seen) == {}
    write(run.heartbeat(1, 1), Heartbeat(3))
    write(run.heartbeat(1, 2), Heartbeat(9))  # there is no such rank
    assert (places(seen), seen.furthest_step, seen.complete) == ({1: (3, "step")}, 3, False)
    run.heartbeat(1, 0).write_text("7 complete")
    assert places(seen) == {0: (7, "step"), 1: (3, "step")}
    assert (seen.furthest_step, seen.complete) == (7, True)
    assert seen.interpret(RankExit(0, 9), look=False).code == 0  # complete by its own word
    assert places(seen) == {1: (3, "step")}
    assert seen.furthest_step == 7


def test_the_programs_own_file_counts_from_its_first_change_on(
    reports: Callable[..., ProgramReports], tmp_path: Path
) -> None:
    own = tmp_path / "progress.txt"
    own.write_text("400 complete")  # of an earlier attempt
    seen = reports(ProgramSection(progress_file=str(own)))
    assert places(seen) == {0: (0, "start")}
    assert (seen.furthest_step, seen.complete) == (None, False)
    own.write_text("401\n")
    assert places(seen) == {0: (401, "step")}
    write(RunDirectory(tmp_path / "run").heartbeat(1, 0), Heartbeat(402))
    assert places(seen) == {0: (402, "step")}  # it says so itself
    own.unlink()
    assert places(seen) == {0: (402, "step")}


def test_of_kempners_own_ranks_no_file_is_looked_at(
    reports: Callable[..., ProgramReports], tmp_path: Path
) -> None:
    seen = reports(None)
    write(RunDirectory(tmp_path / "run").heartbeat(1, 0), Heartbeat(3))
    assert places(seen) == {}


@pytest.mark.parametrize(
    ("chunks", "step"),
    [
        ([b"step 4 of 9\n"], 4),
        ([b"ste", b"p 4", b"2 of 9\n"], 42),
        ([b"step 4\rstep 5\rstep 6"], 5),  # a bar; its last line is not whole
        ([b"step 4 step 5\n"], 5),
        ([b"step 1,204\nloss 3\n"], 1204),
        ([b"\xff step 7 \xfe\n"], 7),
        ([b"x" * 5000 + b" step 8\n"], None),  # too long a line
        ([b"step 4\n", b"step two\n"], 4),
        ([b"step \n"], None),
    ],
)
def test_the_newest_step_in_what_is_printed(chunks: list[bytes], step: int | None) -> None:
    lines = StepFinder(r"step ([\d,]+|two)?")
    for chunk in chunks:
        lines.feed(chunk)
    assert lines.step == step


@pytest.mark.parametrize("length", [1, 999, 65536, 100_000])
def test_the_last_that_was_printed_in_pieces_of_any_length(length: int) -> None:
    recent, said = RecentBytes(), random.Random(length).randbytes(300_000)
    for at in range(0, len(said), length):
        recent.add(said[at : at + length])
        if length > 1:
            recent.share(at_once=True)
            assert recent.read() == said[: at + length][-65536:]
    recent.share(at_once=True)
    assert recent.read() == said[-65536:]


PRINTS = (
    "import sys; sys.stderr.write('step 3\\n'); sys.stderr.flush(); print('step 4'); sys.exit(5)"
)


def test_what_a_rank_prints_is_read_on_its_way(tmp_path: Path) -> None:
    printed, heartbeat = tmp_path / "rank-1.out", tmp_path / "heartbeat"
    environ = {**os.environ, HEARTBEAT_FILE: str(heartbeat)}
    program = Program.of_user([sys.executable, "-c", PRINTS], pattern="step ([0-9]+)")
    ends: list[RankExit] = []
    before = set(Path("/proc/self/fd").iterdir())
    children = Children()
    children.prepare(program)
    children.start(
        ChildRank(1, {**environ, "RANK": "1", "WORLD_SIZE": "2"}, printed), program, ends.append
    )
    wait_until(lambda: ends, "its end", 30)
    children.close()
    assert (ends[0].rank, ends[0].status, ends[0].asked) == (1, 5, False)
    assert printed.read_text() == "step 3\nstep 4\n"
    assert parse(heartbeat.read_text()) == Heartbeat(4)
    assert set(Path("/proc/self/fd").iterdir()) <= before


SUPERVISES = """
import os, sys
from pathlib import Path
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.children import Children
from kempner.supervisor.launchers.rank_output import ChildRank

children, program = Children(), Program.of_user([sys.executable, "-c", sys.argv[1]])
children.prepare(program)
rank = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
children.start(ChildRank(1, rank, Path("rank-1.out")), program, print)
while True:
    os.read(0, 1)
"""

SAVES = """
import os, pathlib, time
pathlib.Path("there").touch()
while not os.path.exists("alone"):
    time.sleep(0.01)
for _ in range(4096):
    print("." * 1023, flush=True)
print("saved")
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_supervisor_that_is_gone_or_stuck_holds_up_no_rank_that_prints(
    tmp_path: Path, how: signal.Signals
) -> None:
    """Much more than a pipe has room for; its last words are kept."""
    kept = tmp_path / "rank-1.out"
    command = [sys.executable, "-c", SUPERVISES, SAVES]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE) as supervisor:
        wait_until((tmp_path / "there").exists, "the rank", 30)
        supervisor.send_signal(how)
        (tmp_path / "alone").touch()
        try:
            wait_until(
                lambda: kept.exists() and kept.read_text().endswith("saved\n"), "its end", 30
            )
        finally:
            supervisor.kill()


def tell(folder: Path, *words: str, file: str = "heartbeat") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, HEARTBEAT_FILE: str(folder / file) if file else ""}
    command = [sys.executable, "-m", "kempner", "heartbeat", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_the_command_says_it_and_never_fails_for_want_of_a_file(tmp_path: Path) -> None:
    assert tell(tmp_path, "--step=7").returncode == 0
    assert (tmp_path / "heartbeat").read_text() == "7\n"
    assert tell(tmp_path, "--step=8", "--complete").returncode == 0
    assert (tmp_path / "heartbeat").read_text() == "8 complete\n"
    assert tell(tmp_path, "--step=8", file="").returncode == 0
    lost = tell(tmp_path, "--step=8", file="gone/heartbeat")
    assert (lost.returncode, lost.stderr.count("\n")) == (0, 1)
    assert "cannot be written: No such file or directory" in lost.stderr
    for words in ((), ("--step=-1",), ("--step=x",)):
        refused = tell(tmp_path, *words)
        assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat"]
