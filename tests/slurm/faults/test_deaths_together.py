"""Two processes die at once, or one does while the link to its buddy is bad: what is in memory is
used if it is whole, and the disk is there if it is not."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
from drilling import note
from harness import Run, wait_until
from lab import SERVICES, Cluster
from submitting import STEPS, Project, assert_like

from kempner.run.record.lease import look
from kempner.run.record.ledger import read_lines

pytestmark = [pytest.mark.timeout(480), pytest.mark.drill]

IN_MEMORY = (f"--train.max_steps={STEPS}", "--checkpoint.in_memory=true")
KEPT = (*IN_MEMORY, "--checkpoint.interval=25")
BUDDY = (
    *IN_MEMORY,
    "--checkpoint.interval=1000",
    "--checkpoint.buddy=true",
    "--checkpoint.buddy_share=1",
)
"""What is on disk does not help."""


CUT = 5.0
"""Seconds for which a link carries nothing."""


def said(project: Project, event: str, attempt: int = 1) -> list[dict[str, Any]]:
    """The supervisor's log lines of one event in an attempt."""
    log = project.run.record.supervisor_log(attempt)
    return [line for line in read_lines(log) if line["event"] == event]


def agent(project: Project, node: str) -> int:
    return [int(line["pid"]) for line in said(project, "agent connected") if line["node"] == node][
        -1
    ]


def rank(project: Project, number: int) -> int:
    return [int(line["pid"]) for line in said(project, "rank connected") if line["rank"] == number][
        -1
    ]


def made_in(project: Project, attempt: int) -> int:
    """The last step of an attempt of which rank 0 has told."""
    return max(int(step["step"]) for step in project.run.metrics() if step["attempt"] == attempt)


def kill(project: Project, node: str, *pids: int) -> None:
    """All of them, one system call after the other."""
    project.cluster.run(node, "kill", "-KILL", *map(str, pids))


def back_at(project: Project, job: str, drill: str) -> int:
    """Wait until the second attempt has loaded, and record what it cost. Returns its step."""
    project.wait_until(job, lambda: project.events("resumed"), "it goes on", 240.0)
    step = int(project.events("resumed")[0]["step"])
    note(drill, steps_made_again=made_in(project, 1) - step)
    return step


def test_an_agent_and_its_rank(project: Project, undisturbed: Run) -> None:
    """With them goes what their node holds; its buddy has it."""
    job = project.train(*BUDDY)
    project.reach(job, 41)
    kill(project, "node2", rank(project, 1), agent(project, "node2"))
    step = back_at(project, job, "agent and rank at once, with a buddy")
    (salvaged,) = project.events("step_salvaged")
    assert salvaged["from_buddies"] == 1
    assert salvaged["step"] == step >= made_in(project, 1) - 3
    project.end(job)
    assert project.cluster.job(job)["Restarts"] == "0"
    assert_like(project.run, undisturbed)


def test_a_supervisor_and_a_rank(project: Project, undisturbed: Run) -> None:
    """No process is left that could salvage: the job goes back into the queue, and to its last
    commit at the worst."""
    job = project.train(*KEPT)
    project.reach(job, 41)
    seen = look(project.run.record.supervisors)
    assert seen is not None
    assert seen.holder is not None
    pid = rank(project, 0)
    kill(project, "node1", pid, seen.holder.pid)
    newest = project.run.latest()
    step = back_at(project, job, "supervisor and rank at once")
    assert step >= newest >= 25
    project.end(job)
    assert project.cluster.job(job)["Restarts"] == "1"
    assert_like(project.run, undisturbed)


def test_an_agent_whose_copies_go_by_a_slow_link(project: Project, undisturbed: Run) -> None:
    """Training fills the link: copies come late, and whole."""
    job = project.train(*BUDDY)
    project.reach(job, 5)
    project.slow(rate="16mbit")
    project.reach(job, 41)
    kill(project, "node2", agent(project, "node2"))
    step = back_at(project, job, "lost memory, slow link to the buddy")
    assert [event["from_buddies"] for event in project.events("step_salvaged")] == [1]
    assert step >= made_in(project, 1) - 10
    project.hurry()
    project.end(job)
    assert_like(project.run, undisturbed)


def test_an_agent_whose_link_was_cut_and_is_whole_again(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    """Nothing is heard for some seconds; copies go on after it."""
    job = project.train(*BUDDY)
    project.reach(job, 31)
    cluster.cut("node2", "ib0", "silent")
    time.sleep(CUT)
    stood = made_in(project, 1)
    cluster.heal("node2", "ib0")
    project.reach(job, stood + 10)
    kill(project, "node2", agent(project, "node2"))
    step = back_at(project, job, "lost memory, after a cut of the link to the buddy")
    assert [event["from_buddies"] for event in project.events("step_salvaged")] == [1]
    assert step >= made_in(project, 1) - 3
    project.end(job)
    assert project.run.attempt() == 2
    assert_like(project.run, undisturbed)


def test_a_whole_job_while_it_pours(project: Project, undisturbed: Run) -> None:
    """All that the run has on its nodes dies in the moment in which a salvage writes: the next
    start has that step, or the commit before it, and nothing torn."""
    job = project.train(*KEPT)
    project.reach(job, 41)
    newest = project.run.latest()
    machines = [project.cluster.machines[node] for node in ("node1", "node2")]
    found = [each for machine in machines for each in machine.processes().items()]
    ours = [pid for pid, name in found if name not in SERVICES]
    begun = set(project.run.checkpoints.glob(".step-*"))
    pours = lambda: set(project.run.checkpoints.glob(".step-*")) - begun  # noqa: E731
    kill(project, "node2", rank(project, 1))
    wait_until(pours, "the salvage", interval=0.001)
    for pid in ours:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    project.end(job, "FAILED")
    note("whole job in a salvage", was_in_time=project.run.latest() == newest)
    job = project.train(*KEPT)
    assert back_at(project, job, "whole job in a salvage") >= newest
    project.end(job)
    assert_like(project.run, undisturbed)
