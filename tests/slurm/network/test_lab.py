"""The lab is what it says: eight machines, a real Slurm, and faults that come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until
from lab import Cluster, missing

from kempner.lab import cluster as kempner_lab

pytestmark = pytest.mark.timeout(300)


def test_a_job_runs_on_eight_machines_with_networks_of_their_own(
    cluster: Cluster, tmp_path: Path
) -> None:
    report = "echo $(hostname) $(hostname -I) $(ls /sys/class/net)"
    job = cluster.sbatch(
        "--nodes=8", f"--output={tmp_path}/out", f"--wrap=srun sh -c '{report}'", cwd=tmp_path
    )
    cluster.wait_for(job, "COMPLETED")
    expected = [f"node{k} 10.20.0.{10 + k} 10.10.0.{10 + k} em4 ib0 lo" for k in range(1, 9)]
    assert sorted((tmp_path / "out").read_text().splitlines()) == expected


@pytest.mark.every_slurm
def test_accounting_knows_how_a_job_ended(cluster: Cluster) -> None:
    job = cluster.sbatch("--gpus-per-node=2", "--output=/dev/null", "--wrap=exit 3")
    cluster.wait_for(job, "FAILED")
    wanted = {"State": "FAILED", "ExitCode": "3:0"}
    recorded = lambda: wanted in cluster.sacct(job, "State", "ExitCode")  # noqa: E731
    wait_until(recorded, "sacct knows the end", interval=0.2)
    assert "gres/gpu=2" in cluster.sacct(job, "AllocTRES")[0]["AllocTRES"]


def sleeper(cluster: Cluster, *arguments: str) -> str:
    """A running job that would take for ever."""
    job = cluster.sbatch(*arguments, "--output=/dev/null", "--wrap=sleep infinity")
    cluster.wait_for(job, "RUNNING")
    return job


@pytest.mark.every_slurm
def test_a_job_of_high_priority_pushes_another_out(cluster: Cluster) -> None:
    cluster.configure(grace=0)
    job = sleeper(cluster, "--nodes=8", "--requeue")
    preemptor = cluster.preempt(job, seconds=1)
    cluster.wait_for(preemptor, "COMPLETED")
    cluster.wait_for(job, "RUNNING")
    assert cluster.job(job)["Restarts"] == "1"
    states = [row["State"] for row in cluster.sacct(job, "State", duplicates=True)]
    assert "PREEMPTED" in states


@pytest.mark.drill
def test_preemption_by_quality_of_service(cluster: Cluster) -> None:
    cluster.configure(preempt="qos", grace=0)
    job = sleeper(cluster, "--nodes=2", "--requeue")
    cluster.wait_for(cluster.preempt(job, seconds=1), "COMPLETED")
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", "requeued", interval=0.1)


@pytest.mark.drill
def test_a_requeued_job_runs_again_on_the_same_id(cluster: Cluster) -> None:
    job = sleeper(cluster, "--nodes=3")
    cluster.scontrol("requeue", job)
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", "requeued", interval=0.1)
    cluster.wait_for(job, "RUNNING")


@pytest.mark.parametrize(("how", "carrier"), [("cable", "0"), ("silent", "1")])
def test_a_link_breaks_and_mends(cluster: Cluster, how: str, carrier: str) -> None:
    def reach() -> int:
        probe = "exec 3<>/dev/tcp/10.10.0.12/6818"  # slurmd of node2, over ib0
        return cluster.run("node1", "timeout", "1", "bash", "-c", probe, check=False).returncode

    assert reach() == 0
    cluster.cut("node2", "ib0", how)
    seen = lambda: cluster.run("node2", "cat", "/sys/class/net/ib0/carrier").stdout.strip()  # noqa: E731
    wait_until(lambda: seen() == carrier, "the node sees it")
    assert reach() != 0
    cluster.heal("node2", "ib0")
    wait_until(lambda: reach() == 0, "the link is whole")


def test_ranks_reach_each_other_over_ib0_alone(cluster: Cluster) -> None:
    """A port without a listener is refused by the kernel there, if the call gets so far."""

    def call(caller: str, address: str, port: int = 22) -> str:
        probe = f"exec 3<>/dev/tcp/{address}/{port}"
        told = cluster.run(caller, "timeout", "2", "bash", "-c", probe, check=False)
        return {0: "taken", 1: "refused", 124: "silence"}[told.returncode]

    assert call("node1", cluster.address("node2", "ib0")) == "refused"
    assert call("node1", "node2") == call("node1", cluster.address("node2", "em4")) == "silence"
    assert call("node1", "node2", 6818) == "taken"  # slurmd
    assert call("login1", "node2") == call("node2", "login1") == "refused"
    cluster.configure(open_management=True)
    assert call("node1", "node2") == "refused"


@pytest.mark.every_slurm
def test_a_node_is_lost_and_comes_back(cluster: Cluster) -> None:
    cluster.configure(slurmd_timeout=10)
    job = sleeper(cluster, "--nodes=2", "--nodelist=node[7-8]", "--no-requeue")
    cluster.crash("node8")
    cluster.wait_for(job, "NODE_FAIL", deadline=150)
    assert cluster.job(job)["Restarts"] == "0"
    cluster.boot("node8")
    cluster.wait_idle()


@pytest.mark.parametrize("fault", ["crash", "power_off", "kill_slurmd", "hang"])
def test_every_fault_of_a_node_is_mended_between_tests(
    cluster: Cluster, fault: str, tmp_path: Path
) -> None:
    job = sleeper(cluster, "--nodes=2", "--no-requeue")
    getattr(cluster, fault)("node2")
    cluster.restore()
    assert cluster.squeue(job) == ""
    out = tmp_path / "out"
    told = cluster.sbatch("--nodes=8", f"--output={out}", "--wrap=srun hostname")
    ended = cluster.wait_for(told, "COMPLETED", "FAILED", "NODE_FAIL")
    assert ended == "COMPLETED", out.read_text()


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_nothing_outlives_a_session_that_is_killed(tmp_path: Path) -> None:
    lab = [sys.executable, str(Path(__file__).parents[1] / "lab.py")]
    session = subprocess.Popen(
        [*lab, "sh", "-c", "readlink /proc/self/ns/pid; sleep infinity"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert session.stdout is not None
    space = session.stdout.readline().strip()
    try:
        assert processes_of(space)
    finally:
        session.send_signal(signal.SIGKILL)
        session.wait()
    wait_until(lambda: not processes_of(space), "its login machine is gone")
    (folder,) = tmp_path.iterdir()
    kempner_lab.Cluster(folder).down()  # its control groups


def processes_of(space: str) -> list[str]:
    """Processes in a PID namespace."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str((entry / "ns" / "pid").readlink()) == space:
                found.append(entry.name)
        except OSError:  # it ended while we looked
            continue
    return found
