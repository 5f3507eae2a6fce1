"""The run's record on disk: ledger, attempts, fence, durable files."""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import scaled

from kempner.run.control.launch_env import Launch
from kempner.run.link.auth import Secret
from kempner.run.output import logs, writers
from kempner.run.process.durable_io import append_line, await_entry, join_directory, replace_durable
from kempner.run.process.exit_codes import UsageError
from kempner.run.record import ledger
from kempner.run.record.attempts import Attempt, Fence, SupersededError, begin_attempt, read_current
from kempner.run.record.events import (
    AttemptEnded,
    AttemptStarted,
    Restarting,
    Signalled,
    StartedAnew,
)
from kempner.run.record.run_dir import RunDirectory


@pytest.fixture
def record(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def test_ledger_reads_back_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.Ledger(path).record(AttemptStarted(ranks=4), attempt=1)
    ledger.Ledger(path).record(AttemptEnded(75, "asked to", None, {}), attempt=1)
    events = list(ledger.read_lines(path))
    assert [(e["event"], e["schema"]) for e in events] == [
        ("attempt_started", 1),
        ("attempt_ended", 1),
    ]
    assert events[0]["ranks"] == 4
    assert events[1]["code"] == 75


def test_a_line_torn_at_any_byte_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "_LOOK", 0.0)
    whole = tmp_path / "whole.jsonl"
    ledger.Ledger(whole).record(StartedAnew(), 1)
    ledger.Ledger(whole).record(Restarting("ä" * 5), 1)
    content = whole.read_bytes()
    first_line = content.index(b"\n") + 1
    for cut in range(first_line, len(content)):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(content[:cut])
        ledger.Ledger(path).record(Signalled(), 1)
        names = [json.loads(line)["event"] for line in path.read_text().splitlines()]
        assert names in (["started", "signalled"], ["started", "restarting", "signalled"])
        assert "restarting" not in names or cut == len(content) - 1


def test_ledger_of_a_run_that_never_was_is_empty(tmp_path: Path) -> None:
    assert list(ledger.read_lines(tmp_path / "nothing.jsonl")) == []


def test_lines_that_cannot_be_written_come_later_in_order_and_that_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    journal = writers.open_lines(path, logs.warn)
    for step in range(3):
        journal.append({"step": step})
    assert capsys.readouterr().err.count("cannot write to file") == 1
    path.unlink()
    journal.append({"step": 3})
    journal.append({"step": 4})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(5))
    said = capsys.readouterr().err
    assert said.count("can write to file again") == 1
    assert "late 3, lost 0" in said


def test_a_line_cut_short_by_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left"):
        append_line(Path("/dev/full"), "x")


def test_attempts_are_numbered_and_the_last_is_current(record: RunDirectory) -> None:
    numbers = [begin_attempt(record).number for _ in range(3)]
    assert numbers == [1, 2, 3]
    current = read_current(record.attempts)
    assert current is not None
    assert current.number == 3
    assert record.attempt(2).is_dir()


def test_attempts_begun_at_once_have_different_numbers(record: RunDirectory) -> None:
    with ThreadPoolExecutor(8) as pool:
        attempts = list(pool.map(lambda _: begin_attempt(record), range(16)))
    assert sorted(a.number for a in attempts) == list(range(1, 17))
    assert read_current(record.attempts) in attempts


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/run cannot be written .*; set run"):
        begin_attempt(RunDirectory(tmp_path / "file" / "run"))


def test_a_new_attempt_fences_the_old_one(record: RunDirectory) -> None:
    old = Fence(record.attempts, begin_attempt(record))
    old.check()
    new = Fence(record.attempts, begin_attempt(record))
    new.check()
    with pytest.raises(
        SupersededError, match=r"attempt 1 must not commit any more: .*names attempt 2"
    ):
        old.check()


def test_a_fence_that_is_away_fences_nobody_off(record: RunDirectory) -> None:
    fence = Fence(record.attempts, begin_attempt(record))
    record.attempts.rename(record.path / "away")
    with pytest.raises(FileNotFoundError, match="CURRENT"):
        fence.check()
    (record.path / "away").rename(record.attempts)
    fence.check()


def test_same_number_with_another_nonce_is_another_attempt(record: RunDirectory) -> None:
    attempt = begin_attempt(record)
    with pytest.raises(SupersededError):
        Fence(record.attempts, Attempt(attempt.number, "00000000")).check()


def test_replace_leaves_the_old_content_until_the_new_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_durable(path, b"old", unique="1")
    (tmp_path / ".file.2").write_bytes(b"left by a killed writer")
    replace_durable(path, b"new", unique="2")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_another_host_made_is_waited_for(tmp_path: Path) -> None:
    late = tmp_path / "late"
    pauses: list[float] = []

    def until_made(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            late.mkdir()

    assert await_entry(late, 60, pause=until_made)
    assert len(pauses) == 3
    assert not await_entry(tmp_path / "never", 0.0, pause=pauses.append)


def test_a_directory_that_exists_before_it_is_seen_is_joined(tmp_path: Path) -> None:
    """A dangling link is like an entry that a network file system has but does not show yet."""
    entry, target = tmp_path / "entry", tmp_path / "target"
    entry.symlink_to(target)
    with pytest.raises(FileExistsError):
        entry.mkdir(exist_ok=True)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join_directory, entry)
        target.mkdir()
        joining.result(scaled(30))
    assert entry.is_dir()
    with pytest.raises(FileNotFoundError):  # storage that is away: nothing is made in its place
        join_directory(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()


def test_launch_survives_the_environment() -> None:
    control = Secret.new()
    launch = Launch(Attempt(7, "abcd"), control, parent=12)
    assert Launch.from_environment(launch.environment()) == launch
    assert Launch.from_environment({"PATH": "/bin"}) is None


_COUNT_SIGNALS = """
import os, queue, signal, sys
from kempner.run.process.signals import inbox
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's `&` around the tests ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)
inbox().install(); inbox().install()
print("ready", flush=True)
sys.stdin.readline()
come = queue.SimpleQueue()
inbox().react_with(come.put)
for _ in range(int(sys.argv[1])): come.get(timeout=float(sys.argv[2]))
print([r.signal.name for r in inbox().received], flush=True)
"""


def _listen(expected: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _COUNT_SIGNALS, str(expected), str(scaled(30))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _let_go_on(process: subprocess.Popen[str]) -> str:
    """What it prints from here on. It waits less long for a signal than we for its last word, so
    that it is the one to say what is missing.
    """
    out, said = process.communicate("go\n", timeout=scaled(60))
    assert process.returncode == 0, f"it ended with {process.returncode}: {out!r}\n{said}"
    return out


def test_every_stop_signal_is_kept_while_the_main_thread_is_busy() -> None:
    process = _listen(5)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        pytest.fail(f"it is not ready: {_let_go_on(process)}")
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    for name in names:
        process.send_signal(signal.Signals[name])
    assert sorted(ast.literal_eval(_let_go_on(process))) == sorted(names)


_ALL_AT_ONCE = """
import gc, os, signal
from kempner.run.process.signals import STOP_SIGNALS, inbox
inbox().install()
others = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
for number in others: signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [*STOP_SIGNALS, *others])
for number in (*STOP_SIGNALS, *others): os.kill(os.getpid(), number)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [*STOP_SIGNALS, *others])
gc.collect()
"""


def test_signals_that_come_all_at_once_leave_the_memory_alone() -> None:
    """The kernel stacks them up, on a stack that has an end."""
    done = subprocess.run(
        [sys.executable, "-c", _ALL_AT_ONCE], capture_output=True, text=True, timeout=scaled(60)
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_blocked_by_the_launcher_is_delivered_on_install() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        process = _listen(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process.send_signal(signal.SIGTERM)  # its interpreter has hardly started
    assert _let_go_on(process) == "ready\n['SIGTERM']\n"


_LEAVE = """
import ctypes, sys, time
from kempner.training.rank_link.shutdown import StopListener
handler = StopListener(); handler.install()
if sys.argv[1] == "peers": handler.join_group()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
until = (ctypes.c_int64 * 2)(int(time.time()) + int(sys.argv[2]), 0)
libc.pthread_mutex_lock(mutex)
print("ready", flush=True)
libc.pthread_mutex_timedlock(mutex, until)  # native code that no signal interrupts
print("left with", handler.should_shutdown(), handler.reason().name, flush=True)
"""


@pytest.mark.parametrize(
    ("place", "seconds", "status", "words"),
    [("alone", 60, 75, ""), ("peers", 3, 0, "left with True SIGNAL")],
)
def test_a_lone_rank_leaves_even_from_native_code_and_one_with_peers_waits(
    place: str, seconds: int, status: int, words: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _LEAVE, place, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=scaled(25))
    assert process.returncode == status
    assert words in out


_CHILD = """
import os, sys
import signal
from kempner.run.process.signals import follow_parent
from kempner.training.rank_link.shutdown import StopListener
StopListener().install()
follow_parent(int(sys.argv[1]), signal.SIGTERM)
print(os.getpid(), flush=True)
sys.stdin.read()
os.pause() if hasattr(os, "pause") else __import__("signal").pause()
"""


def test_a_rank_is_told_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, os, signal;"
            "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]);"
            "signal.pause()",
            _CHILD,
        ],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    parent.kill()
    parent.wait()

    assert select.select([watch], [], [], scaled(20))[0], "the rank outlived its supervisor"
