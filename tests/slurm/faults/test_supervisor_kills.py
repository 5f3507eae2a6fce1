"""SIGKILL and SIGSTOP of the three processes that a job's batch process is split into."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random

import pytest
from drilling import SEED, note
from harness import wait_until
from lab import Cluster
from submitting import LONG, STEPS, Project

KEEPER, WATCHDOG = "kempner-keeper", "kempner-watch"

PARTS, KILLS = 10, 20

LONGEST = 14.0
"""Seconds after the start of a job until its supervisor is killed: it trains after five or so."""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _family(cluster: Cluster, job: str) -> dict[str, int]:
    """The keeper, the watchdog and the supervisor of a job, as numbered outside; not all of them
    where one is gone."""
    host = cluster.job(job).get("BatchHost", "")
    if host not in cluster.machines:
        return {}
    keepers = [p for p in cluster.machines[host].processes() if _name(p) == KEEPER]
    if len(keepers) != 1:
        return {}
    try:
        text = Path(f"/proc/{keepers[0]}/task/{keepers[0]}/children").read_text()
    except OSError:
        return {}
    found = {"keeper": keepers[0]}
    for child in map(int, text.split()):
        found["watchdog" if _name(child) == WATCHDOG else "supervisor"] = child
    return found


def _await_family(cluster: Cluster, project: Project, job: str, launch: int) -> dict[str, int]:
    """Those of a launch of a job, once all are there."""
    found: dict[str, int] = {}

    def there() -> bool:
        state = cluster.job(job)
        if state["JobState"] != "RUNNING" or state["Restarts"] != str(launch):
            return False
        found.update(_family(cluster, job))
        return len(found) == 3

    project.wait_until(job, there, f"launch {launch}", 180.0)
    return found


def _steps(project: Project) -> list[int]:
    """Every step that was made, in the order in which it was."""
    return [row["step"] for row in project.run.metrics()]


@pytest.mark.timeout(600)
@pytest.mark.every_slurm
def test_the_watchdog_that_is_killed_or_stopped_harms_nothing(
    cluster: Cluster, project: Project
) -> None:
    job = project.train(*LONG, nodes=2)
    project.slow()
    first = _await_family(cluster, project, job, 0)
    os.kill(first["watchdog"], signal.SIGKILL)
    project.reach(job, 5)
    project.warn(job)
    second = _await_family(cluster, project, job, 1)
    (requeued,) = project.events("requeued")
    assert "supervisor" not in requeued["reason"]
    project.reach(job, requeued["step"] + 3)
    os.kill(second["watchdog"], signal.SIGSTOP)
    os.kill(second["supervisor"], signal.SIGKILL)  # its keeper wakes the watchdog
    project.hurry()
    project.end(job)
    assert cluster.job(job)["Restarts"] == "2"
    assert sorted(_steps(project)) == list(range(1, STEPS + 1))


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_supervisor_killed_at_any_moment_costs_no_step(
    cluster: Cluster, project: Project, part: int
) -> None:
    """Each part is a run of its own, and can be done by itself."""
    random, moments, idle, before = Random(f"{SEED}/{part}"), list[float](), 0, 0
    steps = 60 * KILLS
    job = project.train(f"--train.max_steps={steps}", "--checkpoint.interval=1000", nodes=2)
    project.slow()
    for launch in range(KILLS):
        family = _await_family(cluster, project, job, launch)
        if idle == 2:  # a run that makes no new step is not put back for ever
            project.reach(job, before + 1)
        moments.append(round(LONGEST * random.random(), 2))
        time.sleep(moments[-1])  # the moment is what is drawn
        os.kill(family["supervisor"], signal.SIGKILL)
        made = max([0, *_steps(project)])
        idle, before = 0 if made > before else idle + 1, made
    wait_until(lambda: cluster.job(job)["Restarts"] == str(KILLS), "the last requeue", 180.0)
    project.hurry()
    project.end(job, deadline=600)
    every = _steps(project)
    note("kill the supervisor", part=part, kills=KILLS, not_requeued=0, seconds=moments,
         steps_lost=len(every) - len(set(every)))  # fmt: skip
    assert sorted(every) == list(range(1, steps + 1))
