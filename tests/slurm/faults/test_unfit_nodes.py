"""A node that is up, and not fit to train on: found before ranks are started there."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Run
from lab import Cluster
from submitting import LONG, Project, assert_like

from kempner.cluster.machine import SKEW
from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.run.record.ledger import read_lines

pytestmark = [pytest.mark.timeout(300), pytest.mark.every_slurm]


def test_a_node_that_does_not_see_the_runs_folder_is_left_out(
    project: Project, undisturbed: Run
) -> None:
    with runs_hidden_from_node2(project):
        job = project.train(*LONG, "--supervise.spare_nodes=1", nodes=3)
        project.end(job)
    (suspect,) = project.events("suspect")
    assert suspect["node"] == "node2"
    assert "not the same folder as on the supervisor's node" in suspect["reason"]
    assert "node2 is suspect, and left out" in project.log(job)
    assert [e["ranks"] for e in project.events("attempt_started")] == [2]
    assert_like(project.run, undisturbed)


@pytest.mark.drill
def test_where_nothing_can_take_its_place_the_job_goes_on_elsewhere(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    """Rather than fail there for the last time.

    `make check` has it of a lost node, in test_lost_nodes.py; whom repeated failures make suspect
    is in tests/unit/supervisor/nodes/test_exclusion.py.
    """
    faults = "kill rank 1 at step 3 attempt 1; kill rank 1 at step 4 attempt 2"
    job = project.train(
        *LONG, "--supervise.max_restarts_without_progress=2", nodes=2, KEMPNER_FAULTS=faults
    )
    project.end(job)
    assert_moved_away_from_node2(cluster, project, job)
    assert_like(project.run, undisturbed)


@pytest.mark.drill
def test_a_save_that_another_node_wrote_elsewhere_is_none(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    with runs_hidden_from_node2(project):
        impatient = ("--checkpoint.max_failures=1", "--resilience.patience=3")
        job = project.train(*LONG, *impatient, nodes=2)
        project.end(job, deadline=300)
    assert "node2 is suspect, and used anyway" in project.log(job)
    reasons = [why for e in project.events("checkpoint_failed") for why in e["reasons"].values()]
    assert reasons
    unseen = "its rank has written __1_0.distcp, but rank 0 does not see it in"
    assert [why for why in reasons if unseen not in why] == []
    assert_moved_away_from_node2(cluster, project, job)
    assert_like(project.run, undisturbed)


@pytest.mark.drill
def test_a_node_that_does_not_see_a_checkpoint_has_no_say_about_it(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    """It was taken for damaged, and set aside with all others."""
    options = (*LONG, "--resilience.health_check=false", "--resilience.patience=5")
    stopped = project.train(*options, nodes=2, options=("--no-requeue",))
    project.reach(stopped, 31)
    project.warn(stopped)
    project.end(stopped, "FAILED")
    (step,) = (event["step"] for event in project.events("stopped"))
    with runs_hidden_from_node2(project):
        job = project.train(*options, nodes=2)
        project.end(job, deadline=300)
    (suspect,) = project.events("suspect")
    assert suspect["node"] == "node2"
    assert f"step-{step:08d} is not visible on node2" in suspect["reason"]
    assert project.events("checkpoint_damaged") == []
    assert_moved_away_from_node2(cluster, project, job)
    assert_like(project.run, undisturbed)


def test_a_node_with_other_code_is_left_out(project: Project) -> None:
    """Where the others have kempner's package, it has a copy with a line more."""
    there, here = project.folder / "kempner-of-node2", ROOT / "kempner"
    shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
    with open(there / "__init__.py", "a") as file:
        file.write("# an older version\n")
    project.cluster.run("node2", "mount", "--bind", str(there), str(here))
    try:
        job = project.train("--supervise.spare_nodes=1", "--train.max_steps=3", nodes=3)
        project.end(job)
    finally:
        project.cluster.run("node2", "umount", str(here))
    (suspect,) = project.events("suspect")
    assert suspect["node"] == "node2"
    assert "it runs kempner's code" in suspect["reason"]
    assert "node2 is suspect, and left out" in project.log(job)


@contextmanager
def runs_hidden_from_node2(project: Project) -> Iterator[None]:
    """Where the others have the folder of all runs, it has an empty one of its own."""
    runs = project.run.folder / "runs"
    runs.mkdir(exist_ok=True)
    project.cluster.run("node2", "mount", "-t", "tmpfs", "tmpfs", str(runs))
    try:
        yield
    finally:
        project.cluster.run("node2", "umount", str(runs))


def assert_moved_away_from_node2(cluster: Cluster, project: Project, job: str) -> None:
    (requeued,) = project.events("requeued")
    assert "requeueing the job without node2" in requeued["reason"]
    assert cluster.job(job)["Restarts"] == "1"
    *before, after = [e["nodes"] for e in project.events("attempt_started")]
    assert set(before) == {"node[1-2]"}
    assert "node2" not in expand_hosts(after)


@pytest.mark.drill
def test_a_node_whose_ranks_fail_first_twice_in_a_row_is_left_out(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    faults = "kill rank 1 at step 12 attempt 1; kill rank 1 at step 25 attempt 2"
    options = ("--supervise.spare_nodes=1", *LONG)
    job = project.train(*options, nodes=3, KEMPNER_FAULTS=faults)
    project.end(job)
    assert [e["node"] for e in project.events("attempt_failed")] == ["node2", "node2"]
    said = "node2 is suspect, and left out: its ranks failed first in attempts 1 and 2"
    assert said in project.log(job)
    third = project.run.record.log(3, 1)
    assert [e["host"] for e in read_lines(third) if e["event"] == "ready"] == ["node3"]
    assert_like(project.run, undisturbed)


SLOW_CLOCK = """
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, id, at);
    if (!failed && id == CLOCK_REALTIME) at->tv_sec -= 300;
    return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return at ? (*at = now.tv_sec) : now.tv_sec;
}
"""
"""A C library in which it is five minutes earlier."""


@contextmanager
def slow_clock(cluster: Cluster, node: str, folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which programs on this node read a clock that is 300 s slow."""
    library, slow = folder / "clock.so", folder / "slow.so"
    for file, text in ((library, ""), (slow, SLOW_CLOCK)):
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(file)]
        subprocess.run(command, input=text, text=True, check=True)
    cluster.run(node, "mount", "--bind", str(slow), str(library))
    try:
        yield {"LD_PRELOAD": str(library)}
    finally:
        cluster.run(node, "umount", str(library))


@pytest.mark.skipif(shutil.which("cc") is None, reason="a slow clock needs a C compiler")
def test_a_batch_host_whose_clock_is_slow_makes_no_other_node_suspect(
    cluster: Cluster, project: Project
) -> None:
    """The controller's clock says which is wrong: the ranks run on all others."""
    with slow_clock(cluster, "node1", project.folder) as environ:
        job = project.train("--supervise.spare_nodes=1", "--train.max_steps=5", nodes=3, **environ)
        project.end(job)
    (suspect,) = project.events("suspect")
    assert suspect["node"] == "node1"
    late = re.fullmatch(r"its clock is (\d+) s behind", suspect["reason"])
    assert late is not None
    assert SKEW < int(late[1]) <= 302  # at least: less by the seconds that the answer took
    hosts = [e["host"] for rank in (0, 1) for e in ready(project, rank)]
    assert hosts == ["node2", "node3"]


def ready(project: Project, rank: int) -> list[dict[str, Any]]:
    """What a rank of the first attempt says when it is ready."""
    log = project.run.record.log(1, rank)
    return [event for event in read_lines(log) if event["event"] == "ready"]
