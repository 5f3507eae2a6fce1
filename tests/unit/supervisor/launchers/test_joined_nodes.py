"""Nodes of other jobs: who may join, which nodes get ranks, and what their own command does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import KEMPNER, wait_until
from patience import scaled

from kempner.cluster.slurm.allocation import Allocation
from kempner.config.sections import SuperviseSection
from kempner.run.link.messages import Joins
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.signals import inbox
from kempner.run.record.events import (
    AttemptEnded,
    CheckpointCommitted,
    PhaseDurationsLearned,
    PhaseTimes,
)
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.run.record.save_times import SaveSeconds
from kempner.supervisor import joining
from kempner.supervisor.joining import AgentEnded, StopTimes
from kempner.supervisor.launchers.agents import node_agent, step
from kempner.supervisor.launchers.agents.invitation import Invitation
from kempner.supervisor.launchers.agents.messages import AgentHello, DepartureRequest
from kempner.supervisor.launchers.agents.step import SlurmAgents
from kempner.supervisor.launchers.base import Idle, Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.run_nodes import RunNodes

INVITATION = Invitation(("127.0.0.1", "127.0.0.2"), 1, "ab" * 32, "{}", "/")


class Pool(RunNodes):
    """Two nodes and a spare one, with two ranks on each; agents are well unless they are `away`."""

    def __init__(self, *sizes: int, least: int | None = None) -> None:
        allocation = Allocation("7", ("node1", "node2"), 2, None, 0, batch=True, spare=("node3",))
        self.section = SuperviseSection(min_nodes=least)
        super().__init__(allocation, self.section, lambda size: not sizes or size in sizes)
        self.away = set[str]()
        self.is_well = lambda node: node not in self.away

    @property
    def used(self) -> Sequence[str]:
        return self.allocation.nodes

    @property
    def launcher(self) -> Launcher:
        return Launcher(self, SlurmAgents(self, self.section))

    def come(self, *nodes: str) -> None:
        for number, node in enumerate(nodes):
            self.join(node, 100 + number, Joins("8", 2, 600.0))

    def go(self, node: str) -> None:
        self.depart(node, DepartureRequest(1, 30.0, "its time is over"))


def refusal(node: str, ranks: int = 2) -> str:
    return Pool().refusal(AgentHello(node, 1, Joins("8", ranks, None)))


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "reachable_addresses", lambda *_: ("127.0.0.1",))


def test_nodes_that_join_get_ranks_at_the_next_start_behind_those_of_the_job() -> None:
    pool = Pool()
    assert (pool.idle, pool.used) == (Idle(), ("node1", "node2"))
    pool.come("node5", "node6")
    assert pool.idle == Idle(("node5", "node6"), 2)
    assert pool.used == ("node1", "node2")
    pool.avoid({})
    assert pool.used == ("node1", "node2", "node5", "node6")
    assert (pool.idle, pool.all[-1]) == (Idle(), "node3")
    pool.avoid({"node1": "it is broken", "node5": "it is, too"})
    assert pool.used == ("node2", "node3", "node6")
    assert pool.idle.nodes == ("node5",)


def test_those_that_leave_or_are_gone_get_none() -> None:
    pool = Pool()
    pool.come("node5", "node6", "node7")
    pool.avoid({})
    pool.go("node5")
    pool.away = {"node6"}
    pool.avoid({})
    assert pool.used == ("node1", "node2", "node7")
    assert set(pool.joined) == {"node5", "node6", "node7"}
    pool.come("node5")  # the same agent, over another connection: it leaves all the same
    pool.away.clear()
    pool.avoid({})
    assert pool.used == ("node1", "node2", "node6", "node7")


def test_who_begins_to_leave_has_the_time_that_it_has_asked_for() -> None:
    """It begins when that is due, and not before: then nothing would be left of the time."""
    pool = Pool()
    pool.join("node5", 100, Joins("8", 2, 0.0))
    pool.depart("node5", DepartureRequest(1, 30.0, "15 s are left of the job's time"))
    left = pool.joined["node5"].seconds_left
    assert left is not None
    assert 20.0 < left <= 30.0


def test_a_mesh_that_is_not_possible_is_not_made() -> None:
    pool = Pool(8, 12)
    pool.come("node5")
    assert pool.idle == Idle()  # of 6 ranks there is no mesh
    pool.avoid({})
    assert pool.used == ("node1", "node2")
    pool.come("node6", "node7")
    assert pool.idle.missing == 2
    pool.avoid({})
    assert len(pool.used) == 4


@pytest.mark.parametrize(("least", "left"), [(None, 2), (1, 1)])
def test_the_run_goes_on_with_as_many_nodes_as_its_job_had_at_first(
    least: int | None, left: int
) -> None:
    pool = Pool(least=least)
    pool.come("node5", "node6")
    pool.avoid({})
    assert pool.least == left


@pytest.mark.parametrize(
    ("node", "ranks", "words"),
    [
        ("node5", 2, ""),
        ("node5", 4, ""),
        ("node1", 2, "node1 belongs to job 7"),
        ("node3", 2, "node3 belongs to job 7"),
        ("node5", 1, "a node needs room for 2 ranks, and node5 has it for 1"),
    ],
)
def test_who_may_join(node: str, ranks: int, words: str) -> None:
    assert refusal(node, ranks).startswith(words)
    assert bool(refusal(node, ranks)) is bool(words)


def test_an_invitation_is_private_and_withdrawn_by_who_has_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "invitation.json"
    assert Invitation.read(path) is None
    INVITATION.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Invitation.read(path) == INVITATION
    newer = replace(INVITATION, port=2)
    newer.write(path)
    INVITATION.withdraw(path)
    assert Invitation.read(path) == newer
    newer.withdraw(path)
    assert [*tmp_path.iterdir()] == []
    replace(newer, version=-1).write(path)
    with pytest.raises(UsageError, match="another version of kempner"):
        Invitation.read(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match="is not yours"):
        Invitation.read(path)


def test_where_the_run_directory_cannot_be_written_nobody_joins_and_all_goes_on(
    tmp_path: Path,
) -> None:
    pool = Pool().launcher
    pool.invite(tmp_path / "nowhere" / "invitation.json")  # before it has agents: nothing at all
    pool._program = Program.of_user(["true"])
    pool.close()


def test_what_hangs_on_a_node_of_another_job_is_sent_away_and_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, done = Pool(), list[str]()
    pool.come("node5")
    launcher = pool.launcher
    fleet = SimpleNamespace(dismiss=lambda node: done.append(f"{node} is sent away"))
    monkeypatch.setattr(launcher, "_fleet", fleet, raising=False)
    end = lambda _, node: done.append(f"{node} is ended")  # noqa: E731
    monkeypatch.setattr(SlurmAgents, "end", end)
    for node in ("node5", "node1"):
        launcher._give_up(node)
    assert done == ["node5 is sent away", "node1 is ended"]


@pytest.mark.parametrize(("code", "left"), [(0, None), (node_agent.ALONE_CODE, INVITATION)])
def test_one_that_was_let_go_waits_for_another_invitation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, left: Invitation | None
) -> None:
    """The supervisor is about to withdraw its own."""
    monkeypatch.setattr(joining, "AGAIN_AFTER", 0.0)
    waits = joining.Joiner(RunDirectory(tmp_path), 2, None, inbox(), 60.0)
    waits._invitation = INVITATION
    agent = SimpleNamespace(invitation=INVITATION, began=time.monotonic())
    assert waits._take_in(AgentEnded(agent, code)) is None
    assert waits._invitation == left


# The command


PATIENT = """
import sys
from kempner.cli.entry import main
from kempner.supervisor import joining
joining.UNKNOWN_SIGNAL_GRACE = 1e6
main()
"""
"""A `kempner` that leaves at its leisure when it is told to, if it does not leave at once."""


def join(
    run: Path, *options: str, kempner: Sequence[str] = tuple(KEMPNER)
) -> subprocess.Popen[str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    command = [*kempner, "join", str(run), *options]
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


def test_a_run_that_is_not_there_or_is_somebody_elses_is_refused(tmp_path: Path) -> None:
    with join(tmp_path / "runs") as process:
        assert process.wait(scaled(60)) == ExitCode.USAGE
        assert process.stderr is not None
        assert "there is no run directory" in process.stderr.read()


def test_without_a_supervisor_it_waits_and_ends_and_says_so(tmp_path: Path) -> None:
    with join(tmp_path, "--wait=1") as process:
        assert process.wait(scaled(60)) == ExitCode.STOPPED
        assert process.stderr is not None
        assert f"{tmp_path} has had no supervisor for 1 s" in process.stderr.read()


def test_a_stop_ends_it_at_once_where_nobody_answers(tmp_path: Path) -> None:
    """The supervisor has died, and left its invitation."""
    program = '{"command": ["true"], "modules": [], "python": "", "pattern": "", "ours": false}'
    run = RunDirectory(tmp_path)
    replace(INVITATION, program=program, folder=str(tmp_path)).write(run.invitation)
    with join(tmp_path, kempner=(sys.executable, "-c", PATIENT)) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: children.read_text(), "its agent", 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(scaled(60)) == ExitCode.STOPPED


def test_one_that_comes_back_when_the_run_is_complete_is_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No supervisor is left to say so: its job would wait, and go back into the queue, for ever."""
    ledger = Ledger(RunDirectory(tmp_path).ledger)
    ledger.record(AttemptEnded(0, "completed", None, {"0": 0}), 1)
    with join(tmp_path) as process:
        assert process.wait(scaled(60)) == ExitCode.COMPLETED
    assert capfd.readouterr().out == "the run is complete\n"


def test_what_a_stop_takes_is_read_again_each_time_that_half_of_the_time_is_over(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path)
    known, ledger = StopTimes(run), Ledger(run.ledger)

    def after(seconds: float | None) -> tuple[float | None, float | None]:
        known.update(seconds)
        if known._reader is not None:
            known._reader.join()
        return known.times.phases.quantile(0.95), known.times.saves.quantile(0.95)

    assert after(1000.0) == (None, None)
    ledger.record(PhaseDurationsLearned(2, {"step": PhaseTimes(4.0, 1.0, 30)}), 1)
    ledger.record(CheckpointCommitted.of(9, 100, SaveSeconds(1.0, 10.0, 1.0)), 1)
    assert after(501.0) == (None, None)
    assert after(500.0) == (5.0, 12.0)  # whatever the number of ranks
    ledger.record(PhaseDurationsLearned(3, {"step": PhaseTimes(6.0, 1.0, 30)}), 2)
    assert after(300.0) == (5.0, 12.0)
    assert after(250.0) == (7.0, 12.0)
