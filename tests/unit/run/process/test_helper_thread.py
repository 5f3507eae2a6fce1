"""A thread that the process cannot do without fails loudly, and begins again."""

from __future__ import annotations

import errno
import threading

import pytest
from patience import scaled

from kempner.run.process.threads import PAUSE, TRIES, keep_running, once_there_is_room


def test_work_that_fails_is_told_of_and_begins_again(capfd: pytest.CaptureFixture[str]) -> None:
    done, paused = list[int](), list[float]()

    def work() -> None:
        done.append(len(done))
        if len(done) < 3:
            raise OSError(12, "Cannot allocate memory")

    keep_running("job", work, paused.append).join(scaled(10))
    assert done == [0, 1, 2]
    assert paused == [PAUSE, PAUSE]
    said = capfd.readouterr().err
    assert said.count("the thread 'job' failed and begins again") == 2
    assert "Cannot allocate memory" in said


def test_a_machine_without_room_for_a_thread_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, failures = threading.Thread.start, [1, 1, 1]

    def start(thread: threading.Thread) -> None:
        if failures:
            failures.pop()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    ran = threading.Event()
    keep_running("job", ran.set, lambda _: None)
    assert ran.wait(scaled(10))
    failures += [1] * TRIES
    with pytest.raises(RuntimeError):
        keep_running("job", ran.set, lambda _: None)


@pytest.mark.parametrize("lack", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_room_for_a_process_or_a_descriptor_is_waited_for_and_nothing_else(lack: int) -> None:
    failures, paused = [lack, lack, errno.EPERM], list[float]()

    def make() -> int:
        if failures:
            raise OSError(failures.pop(0), "no room")
        return 7

    with pytest.raises(PermissionError):
        once_there_is_room(make, paused.append)
    assert paused == [PAUSE, PAUSE]
    assert once_there_is_room(make, paused.append) == 7
