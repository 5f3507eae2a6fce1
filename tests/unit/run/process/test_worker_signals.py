"""Stop signals that reach the workers of a rank, too, are the rank's."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from harness import wait_until

from kempner.run.process import worker_process
from kempner.run.process.signals import SignalInbox, inbox
from kempner.run.process.whereabouts import thread_states
from kempner.run.process.worker_process import heed_only_parent, signals_blocked_in_children

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def installed() -> Iterator[SignalInbox]:
    inbox().uninstall()  # whatever a test before this one has left
    inbox().install()
    assert signal.getsignal(signal.SIGUSR2) not in (signal.SIG_DFL, signal.SIG_IGN)
    yield inbox()
    inbox().uninstall()


def interrupt_oneself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_to_a_forked_worker_is_none_of_its_parent(installed: SignalInbox) -> None:
    """With two workers, one Ctrl-C would be three within two seconds."""
    worker = FORK.Process(target=interrupt_oneself)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_until(lambda: installed.received, "the signal to this process")
    assert [received.signal for received in installed.received] == [signal.SIGUSR2]


def echo(channel: Connection) -> None:
    heed_only_parent()
    while True:
        channel.send(channel.recv())


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "QUIT"])
def test_a_worker_ends_with_its_parents_sigterm_alone(name: str) -> None:
    mine, its = FORK.Pipe()
    worker = FORK.Process(target=echo, args=(its,), daemon=True)
    with signals_blocked_in_children():
        worker.start()
    its.close()
    for word in ("before", "after"):
        mine.send(word)
        assert mine.recv() == word
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)

    def gone() -> bool:
        worker.terminate()  # again: one that comes while another is pending is none
        worker.join(0.1)
        return not worker.is_alive()

    wait_until(gone, "its end")
    assert worker.exitcode == 0


@pytest.mark.parametrize(
    ("stat", "states"),
    [
        ("7 (pt_gloo_runloop) S 1", ["S"]),
        ("7 (pt_gloo_runloop) R 1", ["R"]),
        ("7 (pt_a) R b) D 1", ["D"]),
        ("7 (python) R 1", []),
    ],
)
def test_threads_are_found_by_their_names(stat: str, states: list[str], tmp_path: Path) -> None:
    """One that has ended meanwhile is none."""
    (tmp_path / "7" / "task" / "6").mkdir(parents=True)
    (tmp_path / "7" / "task" / "7").mkdir()
    (tmp_path / "7" / "task" / "7" / "stat").write_text(stat)
    assert thread_states(7, tmp_path, "pt_") == states
    assert thread_states(8, tmp_path, "pt_") == []


def test_a_thread_that_runs_native_code_is_seen() -> None:
    go_on = threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_test", 0, 0, 0)  # PR_SET_NAME, linux/prctl.h
        while not go_on.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: thread_states("self", name="pt_test") == ["R"], "it runs")
    finally:
        go_on.set()
        thread.join()
    wait_until(lambda: thread_states("self", name="pt_test") == [], "its end")


def test_a_fork_waits_until_no_thread_of_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [["S"], ["D"], ["S", "R"]]
    monkeypatch.setattr(worker_process, "_ENTERED_WITHIN", 1e9)
    monkeypatch.setattr(worker_process, "thread_states", lambda *_, **__: looks.pop())
    worker_process.await_native_threads()
    assert looks == []
