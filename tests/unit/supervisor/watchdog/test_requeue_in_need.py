"""Whatever a call between the ranks' end and the requeue does, the job is back in the queue before
its end, once. Which calls there are is found by tracing the supervisor (`batch_job.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from threading import Timer

import pytest
from drilling import SEED, note
from fake_slurm import install, requeues, write_job
from harness import wait_until
from outside import OUTSIDE, Place, nothing_outside
from patience import slowed

PROGRAM = Path(__file__).with_name("batch_job.py")

ENDS_IN = 16.0
"""Seconds from the supervisor's beginning to the end of its job on a quiet machine, and on none
more than `MOST`: each hang lasts until shortly before. The margin is ten."""

MOST = 40.0

AT_ONCE = 6


@dataclass(frozen=True)
class Case:
    """A call, and what becomes of it, or of all storage, processes or memory at that moment."""

    call: str = ""
    how: str = ""
    slots: bool = False

    def __str__(self) -> str:
        return f"{self.call}: {self.how}{', with steps in memory' if self.slots else ''}"


def play(parent: Path, case: tuple[int, Case]) -> str:
    """Play a job to its requeue; what is wrong, in words."""
    number, what = case
    folder = parent / str(number)
    folder.mkdir()
    environ, ends_in = install(folder), min(slowed(ENDS_IN), MOST) if what.call else MOST
    write_job(folder, "RUNNING", 0, time.time() + 1000)
    kind = "slots" if what.slots else "plain"
    how = "wait" if what.how in OUTSIDE and what.how != "oom" else what.how
    with ExitStack() as stack, open(folder / "output", "wb") as output:
        place = stack.enter_context(OUTSIDE.get(what.how, nothing_outside)(folder))
        command = [*place.within, sys.executable, str(PROGRAM), str(folder), str(ends_in)]
        command += [str(place.storage), kind, *filter(None, (what.call, how))]
        job = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        stack.callback(end, job)
        stack.callback(place.release)  # first: what hangs in storage cannot be killed
        try:
            follow(folder, what, place, ends_in)
        except AssertionError as error:
            return f"{what}: {error}: {(folder / 'output').read_text()}"
    late = requeues(folder)[0] > (folder / "ends").stat().st_mtime + ends_in
    said = [*(["late"] if late else []), *(["twice"] if len(requeues(folder)) > 1 else [])]
    return f"{what}: {', '.join(said)}" if said else ""


def follow(folder: Path, what: Case, place: Place, ends_in: float) -> None:
    """Until the job is in the queue again, and that is told."""
    if what.how in OUTSIDE:
        acted = lambda: (folder / "hit").exists() or requeues(folder)  # noqa: E731
        wait_until(acted, "the call", ends_in)
        place.act()
        (folder / "done").touch()
        ends = (folder / "ends").stat().st_mtime + ends_in
        if place.until is not None:
            pause = Timer(max(0.0, ends - place.until - time.time()), place.release)
            pause.start()
            pause.join()
    wait_until(lambda: requeues(folder), "the requeue", ends_in)
    if not what.call:
        wait_until((folder / "calls").exists, "the calls", 20)
    if what.how == "kill":
        wait_until(lambda: "requeued" in ledger(folder), "the ledger's line", 20)


def end(job: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)  # as Slurm does
    job.wait()


def ledger(folder: Path) -> str:
    return (folder / "storage" / "run" / "ledger.jsonl").read_text()


def play_all(parent: Path, cases: Iterable[Case]) -> list[str]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(filter(None, threads.map(partial(play, parent), enumerate(cases))))


@pytest.fixture
def calls(tmp_path: Path) -> Mapping[bool, Sequence[str]]:
    """Those between the ranks' end and the requeue, without and with steps in memory."""
    found = {}
    for slots in (False, True):
        folder = tmp_path / f"traced-{slots}"
        folder.mkdir()
        assert play(folder, (0, Case(slots=slots))) == ""
        found[slots] = (folder / "0" / "calls").read_text().splitlines()
        assert any("fork_exec" in call for call in found[slots])
        assert any("kempner.run.record.lease" in call for call in found[slots])
    assert any("kempner.checkpoint.slots.pour" in call for call in found[True])
    assert any("kempner.checkpoint.store.commit" in call for call in found[True])
    return found


INSIDE = ("hang", "fail", "kill", "descriptors", "memory")


def test_a_call_that_hangs_fails_or_is_the_last_does_not_keep_the_job_from_the_queue(
    calls: Mapping[bool, Sequence[str]], tmp_path: Path
) -> None:
    """A few of them; all in the drill."""
    random = Random(SEED)
    every = [(call, slots) for slots in (False, True) for call in calls[slots]]
    some: list[Case] = []
    for how in (*INSIDE, *OUTSIDE):
        call, slots = random.choice(every)
        some.append(Case(call, how, slots))
    some += [Case(call, "hang", True) for call in calls[True] if "fork_exec" in call]
    assert play_all(tmp_path, some) == []


PARTS = 10
"""Of the drill: each can be done by itself, in some minutes."""


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_call_between_the_ranks_end_and_the_requeue_keeps_the_job_from_the_queue(
    calls: Mapping[bool, Sequence[str]], tmp_path: Path, part: int
) -> None:
    hows = (*INSIDE, *OUTSIDE)
    every = [Case(call, how, slots) for slots in calls for call in calls[slots] for how in hows]
    Random(SEED).shuffle(every)
    cases, began = every[part::PARTS], time.monotonic()
    wrong = play_all(tmp_path, cases)
    seen, met = len(calls[True]), len([*tmp_path.glob("*/hit")])
    counts = {"cases": len(cases), "met": met, "not_requeued": len(wrong)}
    took = round((time.monotonic() - began) / len(cases), 1)
    note("calls before a requeue", part=part, calls=seen, **counts, seconds_a_case=took)
    assert wrong == []
    assert met > len(cases) / 2  # in the others the call was not made
