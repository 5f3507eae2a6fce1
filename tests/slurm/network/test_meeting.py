"""Ranks of a real step find each other, on the right network and in spite of taken ports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import PYTHON, wait_until
from lab import Cluster

from kempner.cluster.network.ports import candidates, job_salt

pytestmark = pytest.mark.timeout(300)

MEETING = str(Path(__file__).parents[1] / "meeting.py")
LISTENER = (
    "import socket, sys; s = socket.create_server(('', int(sys.argv[1]))); "
    "print('listening', flush=True); sys.stdin.read()"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "meeting.toml"
    path.write_text('[data]\ndataset_path = "none"\n[distributed]\ntimeout = 60.0\n')
    return path


def submit(cluster: Cluster, config: Path, step: str, **environ: str) -> tuple[str, Path]:
    """A job of two nodes with one step of ranks; its id and its output.

    srun alone tells ranks where rank 0 is by its node's name, which means em4.
    """
    environ = {"MASTER_ADDR": cluster.address("node1", "ib0"), **environ}
    script = config.with_name("job.sh")
    script.write_text(f"#!/bin/sh\nexec srun {step} {PYTHON} '{MEETING}' '{config}'\n")
    job = cluster.sbatch("--nodes=2", "--cpus-per-task=2", "-n4", str(script), **environ,
                         cwd=config.parent)  # fmt: skip
    return job, config.parent / f"slurm-{job}.out"


def meet(cluster: Cluster, config: Path, step: str, **environ: str) -> list[dict[str, Any]]:
    """What the ranks of a step said, by rank."""
    job, output = submit(cluster, config, step, **environ)
    ended = cluster.wait_for(job, "COMPLETED", "FAILED")
    assert ended == "COMPLETED", output.read_text()
    lines = [line for line in output.read_text().splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda said: int(said["rank"]))


def test_ranks_meet_on_the_fabric_however_they_are_dealt_out(
    cluster: Cluster, config: Path
) -> None:
    said = meet(cluster, config, "-n3 -m cyclic", RANK="0", WORLD_SIZE="99")
    places = [(s["node"], s["local_rank"]) for s in said]
    assert places == [("node1", 0), ("node2", 0), ("node1", 1)]
    assert [s["total"] for s in said] == [3.0] * 3
    assert all(peer.startswith("10.10.0.") for rank in said for peer in rank["peers"])
    assert all(rank["peers"] for rank in said)


def test_a_step_on_part_of_the_job_meets_on_its_own_first_node(
    cluster: Cluster, config: Path
) -> None:
    said = meet(cluster, config, "-N1 -n2 --nodelist=node2", MASTER_ADDR="")
    assert [(s["node"], s["total"]) for s in said] == [("node2", 2.0)] * 2


def test_a_port_that_is_taken_is_passed_over_by_all_ranks(cluster: Cluster, config: Path) -> None:
    salt = job_salt({"SLURM_JOB_ID": next_job(cluster), "SLURM_STEP_ID": "0"})
    beacon, store = candidates(salt)[0], candidates(f"{salt}:store")[:2]
    for port in (beacon, store[0]):
        listener = cluster.start("node1", sys.executable, "-c", LISTENER, str(port))
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
    said = meet(cluster, config, "-n2")
    assert {s["port"] for s in said} == {store[1]}


def next_job(cluster: Cluster) -> str:
    """The id of the next job: the number after that of one that does nothing."""
    job = cluster.sbatch("--output=/dev/null", "--wrap=true")
    cluster.wait_for(job, "COMPLETED")
    return str(int(job) + 1)


def test_two_jobs_share_a_node(cluster: Cluster, config: Path) -> None:
    jobs = [submit(cluster, config, "-n2") for _ in range(2)]
    for job, output in jobs:
        assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output.read_text()


def test_a_node_off_the_fabric_is_named_by_every_rank(cluster: Cluster, config: Path) -> None:
    cluster.configure(open_management=True)  # or they could not even tell each other
    cluster.cut("node2", "ib0", "admin")
    job, output = submit(cluster, config, "-n2", MASTER_ADDR="")
    cluster.wait_for(job, "FAILED")
    text = output.read_text()
    assert text.count("fix the interface of node2, leave it out") == 2, text
    assert "node1: ib0 (10.10.0.11); node2: em4 (10.20.0.12)" in text
    assert "Traceback" not in text
    assert cluster.job(job)["ExitCode"] == "2:0"


def test_a_cluster_without_a_fabric_falls_back_with_a_warning(
    cluster: Cluster, config: Path
) -> None:
    cluster.configure(open_management=True)
    for node in ("node1", "node2"):
        cluster.cut(node, "ib0", "cable")
    job, output = submit(cluster, config, "-n2", MASTER_ADDR="")
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", output.read_text()
    assert "em4 (10.20.0.12), which leads to the master" in output.read_text()


def test_python_in_the_batch_script_waits_for_nobody(cluster: Cluster, config: Path) -> None:
    script = config.with_name("alone.sh")
    script.write_text(f"#!/bin/sh\nexec {PYTHON} -c '{ALONE}'\n")
    job = cluster.sbatch("-N2", "-n4", str(script), cwd=config.parent)
    cluster.wait_for(job, "COMPLETED")
    assert (config.parent / f"slurm-{job}.out").read_text() == "1 none\n"


ALONE = (
    "import os; from kempner.cluster.world import discover; "
    "w = discover(os.environ); print(w.size, w.launcher)"
)


def ask(cluster: Cluster, expression: str) -> subprocess.CompletedProcess[str]:
    """Evaluate an expression of kempner.cluster.slurm.scontrol on the login machine."""
    program = f"from kempner.cluster.slurm.scontrol import *; print({expression})"
    return cluster.run("login1", sys.executable, "-c", program, check=False)


@pytest.mark.every_slurm
@pytest.mark.parametrize("text", ["node[1-3,7]", "a[08-11],b", "r[1-2]n[01-02]"])
def test_hosts_are_expanded_as_scontrol_does(cluster: Cluster, text: str) -> None:
    told = ask(cluster, f"hostnames('{text}') == expand_hosts('{text}')")
    assert told.stdout == "True\n"


def test_what_slurm_refuses_is_told_in_its_words(cluster: Cluster) -> None:
    job = cluster.sbatch("--no-requeue", "--output=/dev/null", "--wrap=sleep infinity")
    cluster.wait_for(job, "RUNNING")
    refused = ask(cluster, f"requeue('{job}')").stdout
    assert f"SlurmRefusedError: `scontrol requeue {job}` was refused: " in refused
    assert "Requested operation is presently disabled" in refused
    assert "Invalid job id" in ask(cluster, "show_job('999999')").stdout
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_a_signal_reaches_each_task_of_one_element_of_an_array_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    script, log = tmp_path / "task.sh", tmp_path / "log"
    script.write_text(
        f"#!/bin/bash\ntrap 'echo $1 >>{log}-signals' TERM\necho $1 >>{log}-started\n"
        "while :; do sleep infinity & wait $!; done\n"
    )
    script.chmod(0o755)
    wrap = f"--wrap=srun -n2 {script} $SLURM_ARRAY_TASK_ID"
    array = cluster.sbatch("-N2", "-n2", "--array=1-2", "--output=/dev/null", wrap)
    started, signals = Path(f"{log}-started"), Path(f"{log}-signals")
    wait_until(lambda: started.exists() and len(started.read_text().split()) == 4, "all run")
    # The last element carries the array's own id; a pending job doubles a step's signals.
    cluster.sbatch("--begin=now+1hour", "--output=/dev/null", "--wrap=true")
    assert ask(cluster, f"signal_tasks('{array}_2')").returncode == 0
    wait_until(lambda: signals.exists() and len(signals.read_text().split()) == 2, "signalled")
    assert ask(cluster, f"end_step('{array}_1', '0')").returncode == 0
    cluster.wait_for(f"{array}_1", "FAILED")
    assert signals.read_text().split() == ["2", "2"]
