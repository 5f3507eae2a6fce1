"""The supervisor's own files on storage that fails for a moment: it waits, and says so."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from harness import wait_until
from patience import scaled

from kempner.run.process import threads as helper
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.retry import StorageUnavailableError, StorageWaits
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import Lease, look
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import Failure
from kempner.supervisor.recovery import give_up


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def test_a_full_disk_is_waited_for_at_the_start(small_disk: Path, patient: StorageWaits) -> None:
    run, ballast = RunDirectory(small_disk / "run"), small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(lambda: (Lease.acquire(run, 45.0), begin_attempt(run)))
        wait_until(lambda: "No space left" in patient.waiting_for, "it to wait")
        assert not begun.done()
        ballast.unlink()
        lease, attempt = begun.result(scaled(30))
    lease.release()
    assert attempt.number == 1
    assert look(run.supervisors).number == 1  # type: ignore[union-attr]


@pytest.mark.usefixtures("patient")
def test_a_folder_that_never_worked_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = RunDirectory(tmp_path / "file" / "run")
    with pytest.raises(UsageError, match=r"set run\.dir to a writable folder"):
        Lease.acquire(run, 45.0)
    with pytest.raises(UsageError, match=r"set run\.dir to a writable folder"):
        begin_attempt(run)


@pytest.mark.usefixtures("patient")
def test_a_lease_outlives_a_stale_descriptor_and_a_folder_that_is_away(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stale = os.pwrite, list[int]()

    def pwrite(descriptor: int, *arguments: object) -> int:
        if not stale:
            stale.append(descriptor)
        if descriptor == stale[0] and len(stale) < 4:
            stale.append(descriptor)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return whole(descriptor, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", pwrite)
    lease = Lease.acquire(run, 1.0)
    wait_until(lambda: lease._beats > 4, "renewals")
    run.path.rename(away := run.path.with_name("away"))
    beats = lease._beats
    wait_until(lambda: lease._beats > beats + 2, "it to try")
    away.rename(run.path)
    beats = lease._beats
    wait_until(lambda: lease._beats > beats + 2, "it to be renewed")
    lease.check()
    assert not lease.lost
    lease.release()
    said = capsys.readouterr().err
    assert "waiting for storage: the lease: Stale file handle" in said
    assert said.count("storage works again: the lease is renewed") == 2


def test_a_run_directory_that_stays_away_is_no_wrong_command(
    run: RunDirectory, patient: StorageWaits
) -> None:
    begin_attempt(run)
    lease = Lease.acquire(run, 45.0)
    patient.configure(0.05)
    run.path.rename(run.path.with_name("away"))
    for ask in (lease.check, lambda: begin_attempt(RunDirectory(run.path / "x"), worked=True)):
        run.path.touch()  # a file in its place: ENOTDIR
        with pytest.raises(StorageUnavailableError) as raised:
            ask()
        assert raised.value.code is ExitCode.STORAGE_UNAVAILABLE
        run.path.unlink()
    lease._over.set()


def test_a_helper_thread_that_fails_says_so_and_goes_on(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(helper, "PAUSE", 0.0)
    failures, done = [OSError("one"), ValueError("two")], threading.Event()

    def work() -> None:
        if failures:
            raise failures.pop(0)
        done.set()

    thread = helper.helper_thread(work, "control")
    thread.start()
    thread.join(scaled(30))
    assert done.is_set()
    assert capsys.readouterr().err.count("the thread 'control' failed and begins again") == 2


def test_a_mark_that_cannot_be_written_leaves_nothing_and_is_not_spoken_of(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begin_attempt(run)
    reason = (
        "3 checkpoints in a row could not be written (rank 0: [Errno 1] Operation not permitted)"
    )

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        decision = Decision(ExitCode.CHECKPOINT_FAILED, reason)
        told = give_up(run, Ledger(run.ledger), attempt, decision, Failure(3, 1), "")
    assert told.advice == "see why checkpoint.dir could not be written to; then start again"
    assert [path.name for path in run.path.iterdir() if "GAVE_UP" in path.name] == []
    assert [event["event"] for event in read_lines(run.ledger)] == ["gave_up"]


def test_room_is_advised_only_where_it_is_short(run: RunDirectory) -> None:
    reason = "rank 0: [Errno 28] No space left on device: 'x'"
    decision = Decision(ExitCode.CHECKPOINT_FAILED, reason)
    ledger, attempt = Ledger(run.ledger), begin_attempt(run)
    told = give_up(run, ledger, attempt, decision, Failure(3, 1), "")
    assert "free disk space" in told.advice


def test_a_ledger_that_cannot_be_read_now_is_read_later(run: RunDirectory) -> None:
    run.path.mkdir()
    run.ledger.write_text('{"event": "resumed", "step": 10}\n')
    history = RunHistory.read(run.ledger)
    run.path.rename(away := run.path.with_name("away"))
    run.path.touch()  # ENOTDIR
    assert history.refresh().last_step == 10
    with pytest.raises(NotADirectoryError):
        RunHistory.read(run.ledger)
    run.path.unlink()
    away.rename(run.path)
    with open(run.ledger, "a") as file:
        file.write('{"event": "resumed", "step": 20}\n')
    assert history.refresh().last_step == 20
