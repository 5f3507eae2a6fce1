"""Work in processes: results in order, errors as they are, and no process left behind."""

from __future__ import annotations

import os
import signal
from multiprocessing import active_children

import pytest

from kempner.data.prepare.process_pool import Report, run_all
from kempner.run.process.exit_codes import DataError, RunError

BAD = 3
SQUARES = [0, 1, 4, 9, 16]


def report_for_ever(number: int, report: Report) -> int:
    while True:
        report(number)


def square(number: int, report: Report) -> int:
    report(number)
    return number**2


def refuse(number: int, report: Report) -> int:
    if number == BAD:
        raise DataError(f"no {number}")
    return number


def die(number: int, report: Report) -> int:
    if number == BAD:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def ignore_progress(number: int, done: int) -> None: ...


@pytest.mark.parametrize("workers", [0, 1, 9])
def test_results_come_in_order_and_each_is_told(workers: int) -> None:
    told: list[int] = []
    assert run_all(square, range(5), workers, lambda number, done: told.append(number)) == SQUARES
    if not workers:  # processes do not report more than a few times a second
        assert told == list(range(5))
    assert active_children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_the_task_s_own(workers: int) -> None:
    with pytest.raises(DataError, match=r"^no 3$"):
        run_all(refuse, range(5), workers, ignore_progress)
    assert active_children() == []


def test_a_killed_process_is_one_sentence() -> None:
    with pytest.raises(RunError, match=r"was killed.*fewer --workers"):
        run_all(die, range(5), 2, ignore_progress)
    assert active_children() == []


def test_an_interruption_ends_the_processes_whatever_they_do() -> None:
    def interrupt(number: int, done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(report_for_ever, range(5), 2, interrupt)
    assert active_children() == []
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
