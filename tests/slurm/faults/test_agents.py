"""Ranks forked by agents: a restart is warm, and an agent may die like any process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from harness import Run, wait_until
from lab import SERVICES, Cluster
from submitting import LONG, Project, assert_like

from kempner.cluster.machine import MemoryGroup
from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(300)


def _said(project: Project, attempt: int, event: str) -> list[dict[str, Any]]:
    """The supervisor's log lines of one event in an attempt."""
    log = project.run.record.supervisor_log(attempt)
    return [line for line in read_lines(log) if line["event"] == event]


def _pid(project: Project, attempt: int, rank: int) -> int:
    """The process of a rank."""
    found = [e for e in _said(project, attempt, "rank connected") if e["rank"] == rank]
    return int(found[-1]["pid"])


def _agent(project: Project, node: str) -> int:
    """The process of a node's newest agent: it has the ranks' fork server as its child, and readers
    of their output, which are forked from it and so are called as it is."""
    run = project.cluster.run
    told = run(node, "pgrep", "-f", "agents.node_agent").stdout.split()
    rows = run(node, "ps", "-o", "pid=,ppid=", "-p", ",".join(told)).stdout.splitlines()
    return max(int(pid) for pid, parent in map(str.split, rows) if parent not in told)


def _kill(project: Project, node: str, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    project.cluster.run(node, "kill", f"-{number}", str(pid))


def _assert_nothing_left(project: Project) -> None:
    """No process of the run is left on any node."""
    cluster, at_rest = project.cluster, {*SERVICES, "sleep"}  # which the first process waits for
    left = lambda: [  # noqa: E731
        (node, name)
        for node in cluster.options.node_names
        for name in cluster.machines[node].processes().values()
        if name not in at_rest
    ]
    wait_until(lambda: not left(), f"nothing is left: {left()}", 30)


def test_a_restart_after_a_kill_is_forked_by_the_same_agents(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    job = project.train(*LONG)
    project.reach(job, 21)
    agents = [_agent(project, node) for node in ("node1", "node2")]
    _kill(project, "node2", _pid(project, 1, 1))
    project.attempt(job, 2)
    project.reach(job, max(project.run.steps()) + 1)
    assert [_agent(project, node) for node in ("node1", "node2")] == agents
    project.end(job)
    assert "not forked" not in project.log(job)
    assert not project.events("suspect")
    assert cluster.job(job)["Restarts"] == "0"
    assert_like(project.run, undisturbed)
    _assert_nothing_left(project)


def test_steps_in_an_agent_s_memory_outlive_a_rank_and_end_with_the_agent(
    project: Project, undisturbed: Run
) -> None:
    job = project.train(*LONG, "--checkpoint.in_memory=true")
    project.reach(job, 21)
    _kill(project, "node2", _pid(project, 1, 1))
    project.attempt(job, 2)
    project.wait_until(job, lambda: project.events("resumed"), "it goes on")
    made = max(step["step"] for step in project.run.metrics() if step["attempt"] == 1)
    (salvaged,) = project.events("step_salvaged")
    assert salvaged["step"] == project.events("resumed")[-1]["step"] >= made - 1
    project.reach(job, salvaged["step"] + 5)
    _kill(project, "node2", _agent(project, "node2"))
    project.attempt(job, 3)
    project.end(job)
    newest = max(e["step"] for e in project.events("checkpoint_committed") if e["attempt"] <= 2)
    assert project.events("resumed")[-1]["step"] == newest
    assert len(project.events("step_salvaged")) == 1
    assert_like(project.run, undisturbed)
    _assert_nothing_left(project)


def test_an_agent_that_is_killed_with_its_rank_in_a_save_is_replaced(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    job = project.train(*LONG)
    project.reach(job, 21)
    before = _agent(project, "node2")
    saving = lambda: any(project.run.checkpoints.glob(".step-*"))  # noqa: E731
    project.wait_until(job, project.held("node2", saving), "a save of all ranks")
    saved = project.run.latest()
    _kill(project, "node2", before)
    project.attempt(job, 2)
    (restarting,) = project.events("restarting")
    # Rank 0 commits what all have written, even if one of them has stood still since.
    newest = max(e["step"] for e in project.events("checkpoint_committed") if e["attempt"] == 1)
    assert newest in (saved, saved + 10)
    assert restarting["reason"].endswith(f"restarting from step {newest}")
    project.reach(job, max(project.run.steps()) + 1)
    assert _agent(project, "node2") != before
    project.end(job)
    assert not project.events("suspect")
    assert cluster.job(job)["Restarts"] == "0"
    assert_like(project.run, undisturbed)
    _assert_nothing_left(project)


def test_an_agent_tells_that_the_kernel_has_killed_its_only_rank_for_want_of_memory(
    project: Project, undisturbed: Run, limited: Callable[[int], MemoryGroup]
) -> None:
    group = limited(2 << 30)
    job = project.train(*LONG, KEMPNER_FAULTS="hog rank 1 at step 60")
    project.reach(job, 21)
    for pid, name in project.cluster.machines["node2"].processes().items():
        if name.startswith(("python", "fork server", "rank")):
            (group.path / "cgroup.procs").write_text(str(pid))
    project.attempt(job, 2)
    project.end(job)
    assert group.oom_kills() == 1
    failed, completed = project.events("attempt_ended")
    assert (failed["culprit"], completed["code"]) == (1, 0)
    # Which group is as the rank has told it last, perhaps before it was put into this one.
    told = "rank 1 was killed by SIGKILL: out of memory: the kernel killed it (oom_kill of "
    assert failed["reason"].startswith(told)
    assert_like(project.run, undisturbed)
    _assert_nothing_left(project)


def test_an_agent_that_is_stopped_is_replaced_once_it_is_needed(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    job = project.train(*LONG)
    project.reach(job, 21)
    _kill(project, "node2", _agent(project, "node2"), signal.SIGSTOP)
    reached = max(project.run.steps())
    project.reach(job, reached + 5)  # its rank goes on
    _kill(project, "node1", _pid(project, 1, 0))
    project.attempt(job, 2)
    project.end(job)
    assert not project.events("suspect")
    assert_like(project.run, undisturbed)
    _assert_nothing_left(project)
