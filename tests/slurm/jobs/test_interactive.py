"""Training in an allocation that the user has already, at a terminal, next to what runs in it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys

import pytest
from harness import ROOT, wait_until
from lab import Cluster
from patience import scaled
from submitting import Project

pytestmark = pytest.mark.timeout(300)

CTRL_C = "\x03"
SIZE = ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=1", "--cpus-per-task=2")
IDLE = {"KEMPNER_PYTHON": sys.executable, "TERM": "dumb"}


def interactive(project: Project, job: str, *overrides: str) -> list[str]:
    return ["scripts/slurm/interactive.sh", job, "tiny/tiny.toml", *overrides]


def at_a_terminal(project: Project, command: list[str]) -> subprocess.Popen[str]:
    """Start a command on the login machine as the foreground of a terminal of its own."""
    typed = [
        "script",
        "--quiet",
        "--return",
        "--command",
        shlex.join(["exec", *command]),
        "/dev/null",
    ]
    return project.cluster.start("login1", *typed, cwd=project.folder, **IDLE)


def press(terminal: subprocess.Popen[str], keys: str) -> None:
    assert terminal.stdin is not None
    terminal.stdin.write(keys)
    terminal.stdin.flush()


def steps(cluster: Cluster, job: str) -> list[str]:
    """The steps of a job that are alive."""
    told = cluster.run("login1", "squeue", "-h", "--steps", "-j", job, "-o", "%i")
    return [step for step in told.stdout.split() if not step.endswith("extern")]


@pytest.fixture
def busy(cluster: Cluster) -> str:
    """An allocation of two whole nodes, in which another step holds every CPU."""
    cluster.run("login1", "salloc", "--no-shell", *SIZE)
    job = cluster.run("login1", "squeue", "-h", "-o", "%i").stdout.strip()
    cluster.start("login1", "srun", f"--jobid={job}", "--ntasks=8", "sleep", "infinity")
    wait_until(lambda: steps(cluster, job) == [f"{job}.0"], "another step runs")
    return job


def test_ctrl_c_ends_the_run_and_nothing_else(project: Project, busy: str) -> None:
    command = interactive(project, busy, "--train.max_steps=100000")
    first = at_a_terminal(project, command)
    project.reach(busy, 5)
    press(first, CTRL_C)
    said, _ = first.communicate(timeout=scaled(60))
    assert first.returncode == 75, said
    assert "this is an interactive allocation: start again in it to continue" in said
    (stopped,) = project.events("stopped")
    assert project.run.latest() == stopped["step"]
    assert steps(project.cluster, busy) == [f"{busy}.0"]

    second = at_a_terminal(project, command)
    project.reach(busy, project.run.latest() + 5)
    project.signal_ranks("node2", signal.SIGSTOP)
    press(second, CTRL_C)
    wait_until(lambda: len(project.events("stop_requested")) == 2, "the first is heard")
    press(second, CTRL_C)
    said, _ = second.communicate(timeout=scaled(60))
    assert second.returncode == 130, said
    assert f"resumed at step {stopped['step']}" in said
    alone = lambda: steps(project.cluster, busy) == [f"{busy}.0"]  # noqa: E731
    wait_until(alone, "the ranks are gone")
    assert project.cluster.job(busy)["JobState"] == "RUNNING"


def test_a_terminal_inside_of_a_batch_job_speaks_only_for_its_run(project: Project) -> None:
    """Without --launcher, too, it trains on the whole job; what else runs there is not touched."""
    cluster = project.cluster
    wrap = "--wrap=srun --overlap sleep infinity"
    job = cluster.sbatch(*SIZE, "--requeue", "--output=/dev/null", wrap)
    wait_until(lambda: f"{job}.0" in steps(cluster, job), "another step runs")
    step = ["srun", f"--jobid={job}", "--overlap", "--pty", "--nodes=1", "--ntasks=1"]
    train = [sys.executable, "-m", "kempner", "supervise", "tiny/tiny.toml", "--slurm.procs=1"]
    terminal = at_a_terminal(project, [*step, *train, "--train.max_steps=100000"])
    project.reach(job, 5)
    press(terminal, CTRL_C)
    said, _ = terminal.communicate(timeout=scaled(60))
    assert f"in job {job}: starting the ranks with srun" in said
    assert ": 2 nodes (node1,node2), 2 ranks, 1 per node" in said
    assert "this is an interactive allocation: start again in it to continue" in said
    (told,) = project.events("not_requeued")
    assert told["step"] == max(project.run.steps())
    assert {f"{job}.0", f"{job}.batch"} <= set(steps(cluster, job))
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")


def test_a_shell_on_a_node_of_a_running_job_is_one_command_away(project: Project) -> None:
    """As docs/slurm.md has it; the run does not notice."""
    page = (ROOT / "docs" / "slurm.md").read_text()
    (command,) = re.findall(r"`(srun --jobid=JOBID [^`]* --pty bash)`", page)
    job = project.train("--train.max_steps=100000")
    project.reach(job, 5)
    words = command.replace("JOBID", job).replace("NODE", "node2").split()
    shell = at_a_terminal(project, words)
    press(shell, "echo in $SLURM_JOB_ID on $SLURMD_NODENAME\nexit 7\n")
    said, _ = shell.communicate(timeout=scaled(60))
    assert f"in {job} on node2" in said
    assert shell.returncode == 7, said
    project.reach(job, max(project.run.steps()) + 5)
    assert project.run.attempt() == 1


def test_a_shell_of_salloc_trains_in_its_own_allocation(project: Project) -> None:
    command = " ".join(interactive(project, "$SLURM_JOB_ID", "--train.max_steps=5"))
    told = project.cluster.run(
        "login1", "salloc", *SIZE, "bash", "-c", command, cwd=project.folder, **IDLE
    )
    assert ": 2 nodes (node1,node2), 2 ranks, 1 per node" in told.stdout
    assert max(project.run.steps()) == 5


@pytest.mark.parametrize(
    ("submitted", "sentence"),
    [
        (True, "kempner: job {job} is still in the queue (BeginTime): try again when "),
        (False, "kempner: `scontrol show job -d -o {job}` was refused: "),
    ],
)
def test_a_job_without_nodes_is_refused(project: Project, submitted: bool, sentence: str) -> None:
    job = "999999"
    if submitted:
        job = project.cluster.sbatch("--begin=now+1hour", "--wrap=true")
    told = project.cluster.run(
        "login1", *interactive(project, job), check=False, cwd=project.folder, **IDLE
    )
    assert told.returncode == 2
    assert told.stdout.startswith(sentence.format(job=job))
    assert told.stdout.count("\n") == 1
