"""Work in processes: results in order, errors as they are, and nobody left behind."""

from __future__ import annotations

import os
import signal
from multiprocessing import active_children

import pytest

from kempner.data.prepare.process_pool import run_all
from kempner.run.process.exit_codes import DataError, RunError

BAD = 3


def square(number: int) -> int:
    return number**2


def refuse(number: int) -> int:
    if number == BAD:
        raise DataError(f"no {number}")
    return number


def die(number: int) -> int:
    if number == BAD:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def nobody(_: int) -> None: ...


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_results_come_in_order_and_each_is_told(workers: int) -> None:
    told: list[int] = []
    assert run_all(square, range(5), workers, told.append) == [0, 1, 4, 9, 16]
    assert sorted(told) == list(range(5))
    assert active_children() == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_the_task_s_own(workers: int) -> None:
    with pytest.raises(DataError, match=r"^no 3$"):
        run_all(refuse, range(5), workers, nobody)
    assert active_children() == []


def test_a_killed_process_is_one_sentence() -> None:
    with pytest.raises(RunError, match=r"was killed.*fewer --workers"):
        run_all(die, range(5), 2, nobody)
    assert active_children() == []


def test_an_interruption_ends_the_processes() -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(square, range(50), 2, interrupt)
    assert active_children() == []
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
