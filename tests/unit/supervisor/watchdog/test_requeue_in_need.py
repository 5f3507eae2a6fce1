"""Whatever a call between the ranks' end and the requeue does, the job is back in the queue before
its end, once. Which calls there are is found by tracing the supervisor (`batch_job.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest
from drilling import SEED, note
from fake_slurm import install, requeues, write_job
from harness import wait_until
from patience import slowed

PROGRAM = Path(__file__).with_name("batch_job.py")

ENDS_IN = 16.0
"""Seconds from the supervisor's beginning to the end of its job on a quiet machine, and on none
more than `MOST`: each hang lasts until shortly before. The margin is ten."""

MOST = 40.0

AT_ONCE = 6

Case = tuple[str, str]
"""A call, and what becomes of it."""


def play(parent: Path, case: tuple[int, Case]) -> str:
    """Play a job to its requeue; what is wrong, in words."""
    number, (call, how) = case
    folder = parent / str(number)
    folder.mkdir()
    environ, ends_in = install(folder), min(slowed(ENDS_IN), MOST)
    write_job(folder, "RUNNING", 0, time.time() + 1000)
    command = [sys.executable, str(PROGRAM), str(folder), str(ends_in), *filter(None, (call, how))]
    with open(folder / "output", "wb") as output:
        job = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: requeues(folder), "the requeue", ends_in)
        if not call:
            wait_until((folder / "calls").exists, "the calls", 20)
        if how == "kill":
            wait_until(lambda: "requeued" in ledger(folder), "the ledger's line", 20)
    except AssertionError as error:
        return f"{call}: {how}: {error}: {(folder / 'output').read_text()}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # as Slurm does
        job.wait()
    late = requeues(folder)[0] > (folder / "ends").stat().st_mtime + ends_in
    said = [*(["late"] if late else []), *(["twice"] if len(requeues(folder)) > 1 else [])]
    return f"{call}: {how}: {', '.join(said)}" if said else ""


def ledger(folder: Path) -> str:
    return (folder / "run" / "ledger.jsonl").read_text()


def play_all(parent: Path, cases: Iterable[Case]) -> list[str]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(filter(None, threads.map(partial(play, parent), enumerate(cases))))


@pytest.fixture
def calls(tmp_path: Path) -> Sequence[str]:
    """Those between the ranks' end and the requeue."""
    folder = tmp_path / "traced"
    folder.mkdir()
    assert play(folder, (0, ("", ""))) == ""
    found = (folder / "0" / "calls").read_text().splitlines()
    assert any("fork_exec" in call for call in found)
    assert any("kempner.run.record.lease" in call for call in found)
    return found


LACKING = ("descriptors", "memory")


def test_a_call_that_hangs_fails_or_is_the_last_does_not_keep_the_job_from_the_queue(
    calls: Sequence[str], tmp_path: Path
) -> None:
    """A few of them; all in the drill."""
    random = Random(SEED)
    some = [(call, how) for how in ("hang", "fail", "kill") for call in random.sample(calls, 2)]
    some += [(calls[0], how) for how in LACKING]
    some += [(call, "hang") for call in calls if "fork_exec" in call]
    assert play_all(tmp_path, some) == []


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_no_call_between_the_ranks_end_and_the_requeue_keeps_the_job_from_the_queue(
    calls: Sequence[str], tmp_path: Path
) -> None:
    every = [(call, how) for call in calls for how in ("hang", "fail", "kill", *LACKING)]
    wrong = play_all(tmp_path, every)
    note("calls before a requeue", calls=len(calls), cases=len(every), not_requeued=len(wrong))
    assert wrong == []
