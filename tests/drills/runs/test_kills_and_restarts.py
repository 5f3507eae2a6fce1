"""SIGKILL of a rank at moments of every kind: the supervisor heals the run where it is."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from drilling import ALL, SEED
from harness import Job, Run, rank_processes, wait_until
from kills import (
    EARLY,
    Kill,
    assert_healed,
    assert_on_demand,
    note_healing,
    overrides,
    plain_start,
    plan_kills,
    steps_made_again,
)

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(7200 if ALL else 240)

WORLD, INTERVAL, KILLS = (4, 3, 50) if ALL else (2, 3, 6)
PATIENCE = 6000.0 if ALL else 180.0


@pytest.mark.cold("killed and restarted, as people see it")
@pytest.mark.parametrize("fork", ["true", *(["false"] if ALL else [])])
def test_kills_at_any_moment_heal_in_place(
    run: Run, reference: Run, tmp_path: Path, corpus: Path, fork: str
) -> None:
    kills = plan_kills(KILLS, WORLD, INTERVAL, SEED)
    options = [*overrides(kills, WORLD, INTERVAL), f"--supervise.fork={fork}"]
    reference.complete(WORLD, *options)
    on_demand = [kill for kill in kills if kill.moment != "start"]
    faults = "; ".join(kill.fault for kill in on_demand)
    job = run.supervise(WORLD, *options, KEMPNER_FAULTS=faults)
    for kill in kills:
        if kill.moment == "start":
            (kill_forked if fork == "true" else kill_from_outside)(run, job, kill)
    assert job.wait(PATIENCE) == 0, job.output()
    assert_on_demand(run, on_demand, job.output())
    assert_healed(run, reference, kills)
    plain = [reference]
    if ALL:  # the machine may have got slower since
        plain.append(Run(tmp_path / "again", corpus))
        plain[-1].complete(WORLD, *options)
    what = "kill and restart" if fork == "true" else "cold kill and restart"
    note_healing(what, run, kills, plain=[plain_start(one) for one in plain])


@pytest.mark.cold("killed and restarted, as people see it")
def test_what_is_in_memory_outlives_kills(run: Run, reference: Run) -> None:
    """A kill costs no step, or the one that was being copied, however rarely the run saves."""
    interval = 25 if ALL else 10
    kills = plan_kills(KILLS, WORLD, interval, SEED + 1)
    options = overrides(kills, WORLD, interval)
    reference.complete(WORLD, *options, deadline=PATIENCE)
    on_demand = [kill for kill in kills if kill.moment != "start"]
    faults = "; ".join(kill.fault for kill in on_demand)
    job = run.supervise(WORLD, *options, "--checkpoint.in_memory=true", KEMPNER_FAULTS=faults)
    for kill in kills:
        if kill.moment == "start":
            kill_forked(run, job, kill)
    assert job.wait(PATIENCE) == 0, job.output()
    assert_on_demand(run, on_demand, job.output())
    assert_healed(run, reference, kills)
    again = steps_made_again(run, kills)
    assert max(again) <= 1, again
    assert statistics.median(again) == 0
    assert_loaded_from_memory(run, kills)
    note_healing("in-memory kill", run, kills, plain=[plain_start(reference)])


def assert_loaded_from_memory(run: Run, kills: Sequence[Kill]) -> None:
    """Where a step was salvaged, its bytes come from where they were, but for the small tensors
    that another rank has written; unless the next kill came before the load."""
    salvaged = {event["attempt"] for event in run.events("step_salvaged")}
    told = [
        line
        for attempt in salvaged
        for line in read_lines(run.record.log(attempt + 1, rank=0))
        if line["event"] == "the state was in memory"
    ]
    too_early = {kill.attempt for kill in kills if kill.moment in EARLY}
    assert salvaged
    assert len(told) >= len([attempt for attempt in salvaged if attempt + 1 not in too_early]) > 0
    assert all(line["from_memory"] >= 0.5 * line["bytes"] for line in told)


def kill_from_outside(run: Run, job: Job, kill: Kill) -> None:
    """Kill a rank some time after its process is there: as Python starts, or imports torch."""
    wait_until(lambda: run.attempt() == kill.attempt, "the attempt", PATIENCE, job, interval=0.05)
    pid = wait_until(lambda: find(job, kill), "the rank's process", job=job, interval=0.05)
    time.sleep(kill.after or 0.0)
    os.kill(pid, signal.SIGKILL)
    assert not run.record.log(kill.attempt, kill.rank).exists(), "it had met the others already"


def kill_forked(run: Run, job: Job, kill: Kill) -> None:
    """Kill a rank as soon as it is forked: it may have connected, and may not have met the others.

    Its name tells its number.
    """
    wait_until(lambda: run.attempt() == kill.attempt, "the attempt", PATIENCE, job, interval=0.01)
    rank = wait_until(
        lambda: rank_processes(job).get(kill.rank), "the rank", job=job, interval=0.01
    )
    rank.kill()


def find(job: Job, kill: Kill) -> int | None:
    """The process id of the rank to be killed, once it is there."""
    for child in psutil.Process(job.process.pid).children():
        with suppress(psutil.Error):  # it may be about to become a rank
            environ = child.environ()
            place = (environ.get("KEMPNER_ATTEMPT"), environ.get("RANK"))
            if place == (str(kill.attempt), str(kill.rank)):
                return child.pid
    return None
