"""The agent launcher over two "nodes" of this machine, with a srun of our own.

`make check` has it on a real Slurm: tests/slurm/faults/test_agents.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from harness import python_script, wait_until
from patience import scaled

from kempner.cluster.slurm import command
from kempner.cluster.slurm.allocation import Allocation
from kempner.config.sections import SuperviseSection
from kempner.probe.node import ProbeQuestion
from kempner.run.control.launch_env import SUPERVISED, Launch
from kempner.run.control.protocol import Stop, TellRanks
from kempner.run.link.auth import Secret
from kempner.run.process.exit_codes import ExitCode, StopReason
from kempner.run.record.attempts import Attempt
from kempner.supervisor.launchers.agents import node_agent, step
from kempner.supervisor.launchers.agents.fleet import SILENT
from kempner.supervisor.launchers.agents.stdio import BY_SRUN
from kempner.supervisor.launchers.agents.step import SlurmAgents
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.run_nodes import RunNodes
from kempner.supervisor.nodes import srun_probe
from kempner.supervisor.policy.outcome import RankExit, decide_outcome

FAKE_SRUN = """
import os, signal, subprocess, sys, time
words = sys.argv[1:]
options = []
while words[0].startswith("-"):
    options.append(words.pop(0))
nodes = next(o for o in options if o.startswith("--nodelist="))[11:].split(",")
(each,) = (int(o[18:]) for o in options if o.startswith("--ntasks-per-node="))
bound = os.environ.get("SLURM_TRES_BIND")
silent = open("silent").read().split() if os.path.exists("silent") else []
size = len(nodes) * each
common = {**os.environ, "SLURM_STEP_NUM_TASKS": str(size)}
common |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
common["SLURM_STEP_TASKS_PER_NODE"] = f"{each}(x{len(nodes)})"
cut_off = open("cut off").read().split() if os.path.exists("cut off") else []
tasks = {
    subprocess.Popen(
        words,
        env={
            **common,
            "SLURMD_NODENAME": node,
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % each),
            "SLURM_NODEID": str(task // each),
            **({"KEMPNER_AGENTS_PORT": "1"} if node in cut_off else {}),
            **({"CUDA_VISIBLE_DEVICES": str(task % each)} if bound else {}),
        },
    ): (node, task)
    for task, node in enumerate(node for node in nodes for _ in range(each)) if node not in silent
}
signal.signal(signal.SIGTERM, lambda *_: [process.kill() for process in tasks])
while tasks:
    process = next((process for process in tasks if process.poll() is not None), None)
    if process is None:
        time.sleep(0.05)
        continue
    node, task = tasks.pop(process)
    if process.returncode == -9:
        print(f"srun: error: {node}: task {task}: Killed", file=sys.stderr, flush=True)
"""

NODES = ("node1", "node2", "node3")


@dataclass
class Job:
    """A launcher in its job, and what it has told."""

    launcher: Launcher
    folder: Path
    program: Program
    ends: list[RankExit] = field(default_factory=list)
    attempt: int = 0

    def start(self) -> None:
        """Start the ranks once more."""
        self.attempt, self.ends[:] = self.attempt + 1, []
        control = Secret.new()
        launch = Launch(Attempt(self.attempt, "n"), control)
        self.launcher.start(launch, self.program, self.ends.append)

    def stop(self) -> None:
        """Ask the ranks to stop."""
        self.launcher.tell_ranks(TellRanks(self.attempt, Stop(StopReason.SIGNAL)), None)

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks of this attempt that have begun, by rank."""
        files = self.folder.glob(f"{self.attempt}.*")
        return {int(file.suffix[1:]): int(file.read_text()) for file in files if file.read_text()}

    def running(self) -> dict[int, int]:
        """The same, once all have begun."""
        wait_until(
            lambda: len(self.ranks()) == self.launcher.nodes.allocation.size, "the ranks run", 60
        )
        return self.ranks()

    def agent(self, rank: int) -> psutil.Process:
        """The agent of a rank's node: its parent, though a fork server has forked it."""
        parent = psutil.Process(self.running()[rank]).parent()
        assert parent is not None
        assert node_agent.__name__ in parent.cmdline()
        return parent

    def spare_agent(self) -> psutil.Process:
        """The agent of node3, which has no ranks: the child of srun that Slurm would have."""
        (found,) = (
            process
            for srun_step in psutil.Process().children()
            for process in srun_step.children()
            if process.status() != psutil.STATUS_ZOMBIE
            and node_agent.__name__ in process.cmdline()
            and process.environ().get("SLURMD_NODENAME") == "node3"
        )
        return found

    def end(self) -> None:
        """As the daemon ends an attempt: it asks for it again and again."""

        def over() -> bool:
            self.launcher.kill()
            return not self.launcher.alive()

        wait_until(over, "nothing is left", 20, interval=0.5)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Two nodes and a spare one; each rank writes down its process, and waits for SIGTERM."""
    for name, text in (
        ("srun", python_script(FAKE_SRUN, "-S")),
        ("scontrol", "#!/bin/sh\nexit 1\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv(SUPERVISED, f"ours:{tmp_path}/run")
    monkeypatch.setattr(step, "reachable_addresses", lambda *_: ("127.0.0.1",))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # answers of nodes must not mix
    monkeypatch.setattr(step, "CONNECT_WITHIN", scaled(120.0))
    monkeypatch.setattr(srun_probe, "_PAUSE", 0.0)
    monkeypatch.setattr(srun_probe, "PROBE_WITHIN", 60.0)  # a busy machine loses no node
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\n"
        "name = os.environ['KEMPNER_ATTEMPT'] + '.' + os.environ['RANK']\n"
        "open(name, 'w').write(str(os.getpid()))\n"
        "while True: signal.pause()\n"
    )
    program = Program.of_user([sys.executable, str(script)], ["json"])
    allocation = Allocation("7", NODES[:2], 1, None, 0, batch=True, spare=NODES[2:])
    section = SuperviseSection(min_nodes=1)
    nodes = RunNodes(allocation, section)
    job = Job(Launcher(nodes, SlurmAgents(nodes, section)), tmp_path, program)
    before = set(psutil.Process().children(recursive=True))
    job.launcher.prepare(program)
    yield job
    job.launcher.close()
    job.launcher.close()  # twice does no harm
    left = lambda: [  # noqa: E731
        p for p in psutil.Process().children(recursive=True)
        if p not in before and p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    ]  # fmt: skip
    wait_until(lambda: not left(), "no process is left", 20)


def test_the_same_agents_start_rank_after_rank(job: Job) -> None:
    job.start()
    agents = [job.agent(rank) for rank in range(2)]
    os.kill(job.running()[1], signal.SIGKILL)
    wait_until(lambda: job.ends == [RankExit(1, -9)], "the end is told", 20)
    job.end()
    assert job.ends == [RankExit(1, -9), RankExit(0, -9, ended_by_us=True)]
    assert job.launcher.prepare_again([], {}) is None
    job.start()
    assert [job.agent(rank) for rank in range(2)] == agents
    job.stop()
    wait_until(lambda: not job.launcher.alive(), "all have stopped", 20)
    assert sorted((end.rank, end.status) for end in job.ends) == [(0, 75), (1, 75)]


def test_what_an_earlier_supervisor_has_left_is_ended_before_a_rank_starts(job: Job) -> None:
    """Slurm may find a node again whose job it has started elsewhere meanwhile."""
    shell = ["sh", "-c", "trap '' TERM; echo; while :; do sleep 0.2; done"]
    marks = f"theirs:{job.folder}/run", f"theirs:{job.folder}/other", os.environ[SUPERVISED]
    left = {
        mark: subprocess.Popen(shell, env={**os.environ, SUPERVISED: mark}, stdout=subprocess.PIPE)
        for mark in marks
    }
    for process in left.values():
        assert process.stdout is not None
        process.stdout.readline()  # it traps the signal by now
    try:
        job.start()
        job.running()
        assert [process.poll() is None for process in left.values()] == [False, True, True]
        job.end()
    finally:
        for process in left.values():
            process.kill()
            process.wait()


def test_what_slurm_refuses_to_start_is_not_the_ranks_failure(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.launcher.close()
    said = "srun: error: Unable to create step for job 7: Invalid generic resource (gres)"
    (job.folder / "srun").write_text(f"#!/bin/sh\necho '{said} specification' >&2\nexit 1\n")
    monkeypatch.setattr(command, "UNCLEAR_WITHIN", 0.5)
    job.start()
    wait_until(lambda: not job.launcher.alive(), "it is given up", 60)
    assert [(end.rank, end.status, end.unstarted) for end in job.ends] == [
        (0, None, True), (1, None, True),
    ]  # fmt: skip
    told = decide_outcome(job.ends)
    assert (told.code, told.scheduler) == (ExitCode.STOPPED, True)
    assert "Invalid generic resource" in told.reason


def _die(agent: psutil.Process) -> None:
    agent.kill()


def _stand_still(agent: psutil.Process) -> None:
    agent.suspend()


@pytest.mark.parametrize("fault", [_die, _stand_still])
def test_an_agent_that_fails_is_replaced_and_its_node_used_again(
    job: Job, fault: Callable[[psutil.Process], None]
) -> None:
    job.start()
    before = job.agent(1)
    fault(before)
    job.end()
    assert {end.rank for end in job.ends} == {0, 1}
    assert job.launcher.prepare_again(["node2"], {}) is None
    assert job.launcher.nodes.all == NODES
    job.start()
    assert job.agent(1) != before
    job.end()


def test_a_node_without_an_agent_that_gives_no_answer_is_left_out(job: Job) -> None:
    job.start()
    agent = job.agent(1)
    (job.folder / "silent").write_text("node2")
    agent.kill()
    wait_until(lambda: job.ends == [RankExit(1, -9)], "the loss is told", 20)
    job.end()
    assert job.launcher.prepare_again(["node2"], {}) is None
    assert job.launcher.nodes.all == ("node1", "node3")
    job.start()
    job.running()
    job.end()


@pytest.mark.parametrize("fault", [_die, _stand_still])
def test_the_agent_of_a_spare_node_that_failed_unnoticed_is_replaced_by_a_survey(
    job: Job, fault: Callable[[psutil.Process], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    question = ProbeQuestion("n", (), None, True)
    assert {vitals.node for vitals in job.launcher.survey(question)} == set(NODES)
    job.start()
    job.running()
    spare = job.spare_agent()
    fault(spare)
    monkeypatch.setattr(srun_probe, "SURVEY_WITHIN", SILENT + 4)
    job.end()
    assert job.launcher.prepare_again([], {}) is None
    assert {vitals.node for vitals in job.launcher.survey(question)} == set(NODES)


def test_agents_that_cannot_connect_speak_over_srun(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.launcher.close()
    (job.folder / "cut off").write_text("node2")
    monkeypatch.setattr(step, "CONNECT_WITHIN", scaled(5.0))  # for node1, too
    job.start()
    agents = [job.agent(rank) for rank in range(2)]
    assert [BY_SRUN in agent.environ() for agent in agents] == [False, True]
    os.kill(job.running()[1], signal.SIGKILL)
    wait_until(lambda: job.ends[:1] == [RankExit(1, -9)], "the end is told", 20)
    job.end()
    assert job.launcher.prepare_again([], {}) is None
    job.start()
    assert [job.agent(rank) for rank in range(2)] == agents
    job.stop()
    wait_until(lambda: not job.launcher.alive(), "all have stopped", 20)


def test_one_open_port_is_enough_for_all_agents_and_ranks(job: Job, tmp_path: Path) -> None:
    job.launcher.close()
    allocation = Allocation("7", NODES[:2], 1, None, 0, batch=True)
    section = SuperviseSection(control_ports="14000-14000")
    nodes = RunNodes(allocation, section)
    other = Job(Launcher(nodes, SlurmAgents(nodes, section)), tmp_path, job.program)
    other.start()
    assert not any(BY_SRUN in other.agent(rank).environ() for rank in range(2))
    other.end()
    other.launcher.close()


def test_ranks_are_bound_as_srun_would_bind_them(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """By srun two tasks of a node get a GPU each; the agent itself is not bound."""
    monkeypatch.setenv("SLURM_TRES_BIND", "gres/gpu:single:1")
    allocation = Allocation("7", NODES[:1], 2, None, 2, batch=True)
    section = SuperviseSection()
    nodes = RunNodes(allocation, section)
    cold = Program.of_user([sys.executable, str(job.folder / "program.py")])
    bound = Job(Launcher(nodes, SlurmAgents(nodes, section)), job.folder, cold)
    bound.start()
    seen = {rank: psutil.Process(pid).environ() for rank, pid in bound.running().items()}
    agent = bound.agent(0)
    bound.end()
    assert {rank: at["CUDA_VISIBLE_DEVICES"] for rank, at in seen.items()} == {0: "0", 1: "1"}
    assert "SLURM_TRES_BIND" not in agent.environ()
    bound.launcher.close()
