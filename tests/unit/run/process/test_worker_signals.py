"""Stop signals that reach the workers of a rank, too, are the rank's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from harness import wait_until

from kempner.run.process.signals import SignalInbox, inbox
from kempner.run.process.worker_process import born_deaf, heed_only_parent, native_threads_run

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
    with born_deaf():
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
    ("stat", "running"),
    [
        ("7 (pt_gloo_runloop) S 1", False),
        ("7 (pt_gloo_runloop) R 1", True),
        ("7 (pt_a) R b) D 1", True),
        ("7 (python) R 1", False),
    ],
)
def test_a_fork_waits_for_threads_of_torch_that_run(
    stat: str, running: bool, tmp_path: Path
) -> None:
    """Not for one that has ended, and so not for ever."""
    (tmp_path / "6").mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(stat)
    assert native_threads_run(tmp_path) is running
    assert not native_threads_run()
