"""Which nodes are left out before a restart: by a positive sign only, and never the own host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kempner.cluster.slurm.allocation import Allocation
from kempner.config.sections import SuperviseSection
from kempner.probe.processes import answer, read_answer, started_later_by_same_user
from kempner.supervisor.launchers.agents import step
from kempner.supervisor.launchers.agents.step import SlurmAgents, StepErrors, task_ends
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.run_nodes import RunNodes
from kempner.supervisor.nodes import srun_probe
from kempner.supervisor.nodes.exclusion import lost_nodes, node_flags, still_boots

UP = {"node1": (), "node3": ()}
SILENT = {"node2": "it does not respond"}


@pytest.mark.parametrize(
    ("accused", "answers", "slurm", "lost"),
    [
        (["node2"], UP, {}, SILENT),  # the others have answered the same question
        (["node2"], {}, {}, {}),  # no node could be asked
        (["node1", "node2"], {}, {}, {}),
        (["node2"], {}, {"node2": "DOWN*+CLOUD"}, SILENT),
        (["node2"], {}, {"node2": "IDLE+NOT_RESPONDING"}, SILENT),
        (["node2"], {}, {"node2": "MIXED"}, {}),
        (["node2"], {}, {"node2": "DRAIN+MIXED"}, {}),  # it still runs what it has
        (["node2"], UP, {"node2": "MIXED+CLOUD+POWERING_UP"}, {}),
        (["node2"], UP, {"node2": "ALLOCATED#+CLOUD"}, {}),
        (["node2"], {"node2": ()}, {"node2": "DOWN"}, {}),  # it answers: Slurm is behind
        (["node1"], {"node3": ()}, {"node1": "DOWN"}, {}),  # the supervisor runs there
        (["node1"], {"node1": (7,)}, {}, {"node1": "process 7 of an earlier attempt still runs"}),
        (["node2"], {"node2": (7, 8)}, {},
         {"node2": "processes 7, 8 of an earlier attempt still run"}),
        ([], UP, {"node2": "DOWN"}, {}),  # which is not accused
    ],
)  # fmt: skip
def test_a_node_is_lost_by_a_positive_sign_only(
    accused: list[str],
    answers: dict[str, tuple[int, ...]],
    slurm: dict[str, str],
    lost: dict[str, str],
) -> None:
    flags = {node: node_flags(state) for node, state in slurm.items()}
    assert lost_nodes(accused, answers, flags, own="node1") == lost


def test_nodes_of_a_cloud_are_known_to_boot() -> None:
    assert still_boots(node_flags("MIXED+CLOUD+POWERING_UP"))
    assert still_boots(node_flags("ALLOCATED#"))
    assert not still_boots(node_flags("IDLE+CLOUD"))
    assert node_flags("IDLE*+CLOUD") == {"IDLE", "NOT_RESPONDING", "CLOUD"}


@pytest.mark.parametrize("line", ["", "srun: error", "[]", "3", '{"node": 3}', '{"left": []}'])
def test_a_line_of_anything_else_is_no_answer(line: str) -> None:
    assert read_answer(line) is None


def test_a_node_tells_which_processes_still_run() -> None:
    """Not one that has ended, and whose parent has not asked yet how."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert read_answer(answer("node2", [child.pid, 2**22])) == ("node2", (child.pid,))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_answer(answer("node2", [child.pid])) == ("node2", ())
    child.communicate()


def test_a_process_that_was_there_before_is_none_of_ours() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert started_later_by_same_user(child.pid, os.getpid())
        assert not started_later_by_same_user(os.getpid(), child.pid)
        assert not started_later_by_same_user(1, os.getpid())
        child.kill()
    assert not started_later_by_same_user(child.pid, os.getpid())


FAKE_SRUN = """#!/bin/sh
echo "$@" >> calls
case "$MOOD" in
fails) echo "srun: error: Unable to create step: Socket timed out" >&2; exit 1;;
hangs) exec sleep 60;;
esac
while [ "${1#-}" != "$1" ]; do
    case "$1" in --nodelist=*) nodes=$(echo "${1#*=}" | tr , ' ');; esac
    shift
done
for node in $nodes; do
    [ "$node" = "$SILENT" ] || SLURMD_NODENAME=$node "$@"
done
"""


def over(allocation: Allocation, section: SuperviseSection) -> Launcher:
    nodes = RunNodes(allocation, section)
    return Launcher(nodes, SlurmAgents(nodes, section))


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Over two nodes, of which it is on the first, with a srun of our own and no scontrol."""
    (tmp_path / "srun").write_text(FAKE_SRUN)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setattr(step, "reachable_addresses", lambda *_: ("127.0.0.1",))
    monkeypatch.setattr(srun_probe, "_PAUSE", 0.0)
    allocation = Allocation("7", ("node1", "node2"), 1, None, 0, batch=False)
    return over(allocation, SuperviseSection(min_nodes=1))


@pytest.mark.parametrize("mood", ["fails", "hangs"])
def test_a_controller_that_does_not_answer_costs_no_node(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, mood: str
) -> None:
    monkeypatch.setenv("MOOD", mood)
    monkeypatch.setattr(srun_probe, "PROBE_WITHIN", 0.5)
    assert launcher.prepare_again(["node2"], {}) is None
    assert launcher.nodes.all == ("node1", "node2")


def test_a_node_that_alone_does_not_answer_is_left_out(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launcher.prepare_again(["node1", "node2"], {}) is None
    assert launcher.nodes.all == ("node1", "node2")
    monkeypatch.setenv("SILENT", "node2")
    assert launcher.prepare_again(["node2"], {}) is None
    assert launcher.nodes.all == ("node1",)
    assert launcher.prepare_again(["node1"], {}) is None  # the own host is not even asked
    assert len(Path("calls").read_text().splitlines()) == 2


def test_a_node_is_used_again_only_once_an_old_rank_is_gone(launcher: Launcher) -> None:
    old = subprocess.Popen(["sleep", "60"])
    assert launcher.prepare_again([], {"node2": [old.pid]}) is None
    assert launcher.nodes.all == ("node1",)
    old.kill()
    old.wait()
    again = over(Allocation("7", ("node1", "node2"), 1, None, 0, batch=False), SuperviseSection())
    assert again.prepare_again([], {"node2": [old.pid]}) is None
    assert again.nodes.all == ("node1", "node2")


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("srun: error: node2: task 1: Killed", [(1, -9)]),
        ("srun: error: node[2-3]: tasks 1,3-4: Exited with exit code 76",
         [(1, 76), (3, 76), (4, 76)]),
        ("srun: error: node2: task 0: Segmentation fault (core dumped)", [(0, -11)]),
        ("srun: error: node2: task 7: Out Of Memory", [(7, -9)]),
        ("srun: error: node2: task 1: Aborted", [(1, -6)]),
        ("srun: error: Node failure on node2", []),
        ("the log says: srun: error: node2: task 1: Killed", []),
        ("srun: error: node2: task 1: Something else", []),
    ],
)  # fmt: skip
def test_what_srun_says_of_its_tasks(line: str, ends: list[tuple[int, int]]) -> None:
    assert list(task_ends(line)) == ends


def test_all_that_srun_prints_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    words = "x" * 200_000 + "\nsrun: error: node2: task 1: Killed\nno newline"
    ends: list[tuple[int, int]] = []
    errors = StepErrors(lambda task, status: ends.append((task, status)))
    content = words.encode()
    for start in range(0, len(content), 65_511):  # the line about the task comes in two parts
        errors.hear(content[start : start + 65_511])
    assert ends == [(1, -signal.SIGKILL)]
    assert capfd.readouterr().err == words
