"""What is tried again, and until when; what is said of it meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kempner.run.process import retry
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.retry import (
    LONGEST_PAUSE,
    StorageUnavailableError,
    StorageWait,
    StorageWaits,
    WaitStoppedError,
    decide_retry,
    empty,
    free_space_helps,
    is_passing,
)


def failure(code: int, path: str = "/mnt/x") -> OSError:
    return OSError(code, os.strerror(code), path)


class Flaky:
    """Work that fails with these errors, one after the other, before it succeeds."""

    def __init__(self, *errors: OSError) -> None:
        self.errors = list(errors)

    def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)


@pytest.mark.parametrize(
    "code",
    [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT, errno.EMFILE,
     errno.ENFILE, errno.ENOMEM, errno.ESHUTDOWN, errno.EREMOTEIO, errno.ENOTCONN],
)  # fmt: skip
def test_what_storage_says_of_itself_is_passing(code: int) -> None:
    assert is_passing(failure(code), worked=False)


@pytest.mark.parametrize(
    "code", [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENODATA]
)
def test_a_wrong_path_is_passing_only_where_it_worked(code: int) -> None:
    assert not is_passing(failure(code), worked=False)
    assert is_passing(failure(code), worked=True)


@pytest.mark.parametrize("code", [errno.EISDIR, errno.ENAMETOOLONG, errno.EEXIST, errno.EBADF])
def test_what_no_time_heals_is_permanent(code: int) -> None:
    assert decide_retry(failure(code), True, 0.0, 1, 600.0).permanent


def test_pauses_grow_and_end_with_the_patience() -> None:
    eio = failure(errno.EIO)
    pauses = [decide_retry(eio, False, 0.0, n, 600.0).pause for n in range(1, 30)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE
    assert decide_retry(eio, False, 599.0, 20, 600.0).pause == 1.0
    over = decide_retry(eio, False, 600.0, 21, 600.0)
    assert (over.again, over.permanent) == (False, False)


def test_an_empty_file_is_waited_for_less_long_and_is_wrong_then() -> None:
    gone = empty(Path("/mnt/x"))
    assert decide_retry(gone, True, 100.0, 5, 600.0).again
    over = decide_retry(gone, True, 120.0, 5, 600.0)
    assert (over.again, over.permanent) == (False, True)


def test_it_is_tried_until_it_works_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[StorageWait] = []
    waits = StorageWaits()
    waits.configure(60.0)
    waits.tell_to(told.append)
    codes = (errno.EIO, errno.ESTALE, errno.EIO)
    assert waits.retry(Flaky(*map(failure, codes))) == "done"
    assert [(w.what, w.tries) for w in told] == [("/mnt/x: Input/output error", 4)]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        "kempner: waiting for storage: /mnt/x: Input/output error",
        "kempner: storage works again: /mnt/x: Input/output error",
    ]
    assert waits.waiting_for == ""
    assert waits.tries == 3


def test_many_short_waits_are_told_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[StorageWait] = []
    waits = StorageWaits()
    waits.configure(60.0)
    waits.tell_to(told.append)
    for _ in range(20):
        waits.retry(Flaky(failure(errno.EIO)))
    assert len(capsys.readouterr().err.splitlines()) == 2
    monkeypatch.setattr(retry, "TELL_EVERY", 0.0)
    waits.retry(Flaky(failure(errno.EIO)))
    assert [w.tries for w in told] == [2, 40]


def test_what_it_waits_for_shows_meanwhile() -> None:
    seen: list[str] = []
    waits = StorageWaits()

    def work() -> None:
        seen.append(waits.waiting_for)
        if len(seen) < 3:
            raise failure(errno.EIO)

    waits.configure(60.0)
    waits.retry(work)
    assert seen == ["", "/mnt/x: Input/output error", "/mnt/x: Input/output error"]


def test_the_patience_ends() -> None:
    waits = StorageWaits()
    waits.configure(0.05)
    with pytest.raises(
        StorageUnavailableError, match=r"^storage is not available.*Stale"
    ) as raised:
        waits.retry(Flaky(*[failure(errno.ESTALE)] * 1000))
    assert raised.value.code is ExitCode.STORAGE_UNAVAILABLE
    assert waits.waiting_for == ""


def test_without_patience_nothing_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StorageUnavailableError, match=r"^storage is not available: /mnt/x: Input"):
        StorageWaits().retry(Flaky(failure(errno.EIO)))
    assert capsys.readouterr().err == ""


def test_a_permanent_failure_is_raised_as_it_is() -> None:
    waits = StorageWaits()
    waits.configure(60.0)
    missing = failure(errno.ENOENT)
    with pytest.raises(FileNotFoundError) as raised:
        waits.retry(Flaky(missing))
    assert raised.value is missing
    assert waits.retry(Flaky(missing), worked=lambda: True) == "done"


@pytest.mark.parametrize("of_the_process", [False, True])
def test_a_stop_ends_the_wait(of_the_process: bool) -> None:
    asked, waits = threading.Event(), StorageWaits()
    waits.configure(600.0, stop=asked.is_set if of_the_process else lambda: False)

    def fail() -> None:
        asked.set()  # after the first look at it
        raise failure(errno.EIO)

    stop: Callable[[], bool] = (lambda: False) if of_the_process else asked.is_set
    with pytest.raises(WaitStoppedError, match="/mnt/x: Input/output error") as raised:
        waits.retry(fail, stop=stop)
    assert raised.value.code is ExitCode.STOPPED


def test_only_want_of_room_is_helped_by_room() -> None:
    assert free_space_helps("rank 0: [Errno 28] No space left on device: 'x'")
    assert free_space_helps("rank 3: Disk quota exceeded")
    assert not free_space_helps("rank 0: [Errno 1] Operation not permitted: 'x'")
