"""One supervisor per run: who may take it, who must wait, and who has lost it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from harness import wait_until
from patience import scaled

import kempner.run.record.lease
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.whereabouts import start_ticks
from kempner.run.record.attempts import SupersededError
from kempner.run.record.lease import (
    RELEASED,
    Holder,
    Lease,
    LeaseReading,
    ask_to_stop,
    is_owned,
    look,
    reason_to_take,
    wait_until_free,
)
from kempner.run.record.run_dir import RunDirectory

ME = Holder("node1", "boot-a/1", 10, 500, "7", 1, "now", 0.3)
SEEN = LeaseReading(0, None, "")
OTHER = replace(ME, pid=11, job=None, restarts=0)


@pytest.mark.parametrize(
    ("seen", "lives", "reason"),
    [
        (LeaseReading(1, OTHER, RELEASED), True, "has exited"),
        (LeaseReading(1, OTHER, "4"), False, "is dead"),
        (LeaseReading(1, OTHER, "4"), True, ""),
        (
            LeaseReading(1, replace(OTHER, machine="boot-b/1"), "4"),
            False,
            "",
        ),  # cannot be seen from here
        (
            LeaseReading(1, replace(OTHER, machine="boot-a/2"), "4"),
            False,
            "",
        ),  # nor into a container
        (
            LeaseReading(1, replace(OTHER, machine="boot-b/1", job="7"), "4"),
            False,
            "was started again",
        ),
        (LeaseReading(1, replace(OTHER, machine="boot-b/1", job="8"), "4"), False, ""),
        (LeaseReading(1, replace(ME, machine="boot-b/1"), "4"), False, ""),  # the same launch
        (LeaseReading(1, replace(ME, machine="boot-b/1", restarts=2), "4"), False, ""),
        (LeaseReading(1, None, ""), False, ""),
    ],
)
def test_who_need_not_be_waited_for(seen: LeaseReading, lives: bool, reason: str) -> None:
    assert reason in reason_to_take(seen, ME, lives)
    assert bool(reason_to_take(seen, ME, lives)) is bool(reason)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def leave_behind(run: RunDirectory, holder: Holder | None = OTHER) -> None:
    """The file of an owner that renews nothing any more."""
    lease = Lease.acquire(run, 1000.0)
    lease.release()
    seen = look(run.supervisors)
    assert seen is not None
    assert seen.holder is not None
    content = (run.supervisors / "1").read_text()
    for ours, theirs in (
        (RELEASED.ljust(20), "4".ljust(20)),
        (seen.holder.machine, "another/1"),
        ('"lasts": 1000.0', '"lasts": 0.3'),
    ):
        assert ours in content
        content = content.replace(ours, theirs)
    (run.supervisors / "1").write_text(content if holder is not None else "")


def test_the_next_one_waits_for_nobody_who_has_left(run: RunDirectory) -> None:
    for number in (1, 2, 3):
        lease = Lease.acquire(run, 1000.0)
        seen = look(run.supervisors)
        assert seen is not None
        assert seen.number == number
        assert seen.holder is not None
        assert seen.holder.pid == os.getpid()
        lease.release()


def test_one_that_lives_is_named_and_left_alone(run: RunDirectory) -> None:
    lease = Lease.acquire(run, 1.0)
    with pytest.raises(UsageError, match=rf"has a supervisor: process {os.getpid()} on .* since"):
        Lease.acquire(run, 1.0)
    lease.check()
    assert not lease.lost
    lease.release()


@pytest.mark.parametrize("holder", [OTHER, None])
def test_one_that_gives_no_sign_of_life_is_replaced(
    run: RunDirectory, holder: Holder | None
) -> None:
    leave_behind(run, holder)
    lease = Lease.acquire(run, 0.3)
    lease.check()
    lease.release()


def test_a_dead_one_of_this_machine_is_replaced_at_once(run: RunDirectory) -> None:
    program = (
        "import os, sys; from pathlib import Path;"
        "from kempner.run.record.run_dir import RunDirectory;"
        "from kempner.run.record.lease import Lease;"
        "Lease.acquire(RunDirectory(Path(sys.argv[1])), 1000.0); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, run.path], check=True)
    seen = look(run.supervisors)
    assert seen is not None
    assert seen.beat != RELEASED
    Lease.acquire(run, 1000.0).release()  # or this would wait for a thousand seconds


def test_one_that_was_replaced_finds_out(run: RunDirectory) -> None:
    lease = Lease.acquire(run, 1.0)
    (run.supervisors / "2").write_text("0\n")
    with pytest.raises(SupersededError, match="taken over"):
        lease.check()
    wait_until(lambda: not lease._thread.is_alive(), "the thread to notice", 10)
    assert lease.lost
    lease.release()


def test_of_many_that_find_a_dead_one_a_single_one_takes_over(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_behind(run)
    together, create, seen = threading.Barrier(8), kempner.run.record.lease._create, set()

    def create_together(path: Path, me: Holder) -> int:
        """All have seen the same dead owner before the first of them takes its place."""
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            together.wait(scaled(60))
        return create(path, me)

    monkeypatch.setattr(kempner.run.record.lease, "_create", create_together)
    won: list[Lease] = []
    lost: list[UsageError] = []

    def start() -> None:
        try:
            won.append(Lease.acquire(run, 1.0))
        except UsageError as error:
            lost.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    won[0].check()
    won[0].release()


def test_the_lease_is_counted_by_the_watchers_clock_alone(run: RunDirectory) -> None:
    leave_behind(run)
    os.utime(run.supervisors / "1", (0, 0))  # its file's times say nothing
    seen = look(run.supervisors)
    assert seen is not None
    naps: list[float] = []

    def pause(seconds: float) -> None:
        naps.append(seconds)
        (run.supervisors / "1").write_text(f"{len(naps)}\n")  # it lives

    with pytest.raises(UsageError, match="has a supervisor"):
        wait_until_free(run.supervisors, seen, ME, pause)
    assert len(naps) == 1


def test_a_process_is_known_by_its_number_and_its_beginning(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "100"])
    began = start_ticks(child.pid)
    assert began is not None
    assert began >= (start_ticks(os.getpid()) or 0)
    child.kill()
    wait_until(lambda: start_ticks(child.pid) is None, "a zombie to count as dead")
    child.wait()
    assert start_ticks(child.pid) is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stat").write_text("1 (a) b) S" + " 0" * 18 + " 77 0\n")
    assert start_ticks(1, tmp_path) == 77


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/run cannot be written .* set run.dir"):
        Lease.acquire(RunDirectory(tmp_path / "file" / "run"), 1.0)


def test_an_owner_is_known_by_its_process_here_and_by_its_beat_elsewhere(run: RunDirectory) -> None:
    lease = Lease.acquire(run, 1000.0)
    assert is_owned(run.supervisors)
    lease.release()
    assert not is_owned(run.supervisors)
    leave_behind(run)
    file = run.supervisors / "2"
    (run.supervisors / "1").rename(file)

    def renew(seconds: float) -> None:
        file.write_text(file.read_text().replace("4 ", "5 ", 1))

    assert not is_owned(run.supervisors)
    assert is_owned(run.supervisors, pause=renew)


def test_a_request_to_stop_reaches_the_owner_of_that_moment_alone(run: RunDirectory) -> None:
    lease = Lease.acquire(run, 0.3)
    assert ask_to_stop(run.supervisors)
    assert not ask_to_stop(run.supervisors)
    wait_until(lambda: lease.stop_asked, "the owner sees it")
    lease.release()
    later = Lease.acquire(run, 0.3)
    beats = lambda: (look(run.supervisors) or SEEN).beat  # noqa: E731
    first = beats()
    wait_until(lambda: beats() not in (first, "1"), "the next owner has looked")
    assert not later.stop_asked
    later.release()
