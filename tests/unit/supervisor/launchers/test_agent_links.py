"""Agents over a real connection on this machine, without Slurm."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from harness import wait_until
from patience import scaled

from kempner.cluster.world import OF_AGENT
from kempner.probe.node import MARK, ProbeQuestion, question_text, read_result
from kempner.run.control.launch_env import SUPERVISED, Launch
from kempner.run.control.protocol import Connected, RankNews, Stop, TellRanks
from kempner.run.link.auth import Secret
from kempner.run.process.exit_codes import StopReason
from kempner.run.process.signals import ReceivedSignal
from kempner.run.record.attempts import Attempt
from kempner.supervisor.launchers.agents import node_agent
from kempner.supervisor.launchers.agents.affinity import shares
from kempner.supervisor.launchers.agents.fleet import Fleet, FleetNews
from kempner.supervisor.launchers.agents.messages import (
    ADDRESSES,
    PORT,
    STEP,
    TOKEN,
    Ended,
    KillRanks,
    Question,
    SealedLaunch,
    StartRanks,
)
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.children import Children

LOOPBACK, NODE = "127.0.0.1", "node1"


class Relay:
    """Stands between an agent and its supervisor, and can cut the two off."""

    def __init__(self, port: int) -> None:
        self._listener, self._to = socket.create_server((LOOPBACK, 0)), port
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self.whole = True
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Both sides see their connection end, and no new one lasts."""
        self.whole = False
        for end in self._open:
            with suppress(OSError):  # over already
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if not self.whole:
                near.close()
                continue
            try:
                far = socket.create_connection((LOOPBACK, self._to))
            except OSError:  # the supervisor's side is closed
                near.close()
                continue
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    @staticmethod
    def _pass_on(one: socket.socket, other: socket.socket) -> None:
        try:
            while received := one.recv(65536):
                other.sendall(received)
        except OSError:
            pass
        finally:
            with suppress(OSError):  # to close it would not wake up who reads from it
                other.shutdown(socket.SHUT_RDWR)


@dataclass
class Place:
    """A supervisor's side, and what it has heard."""

    fleet: Fleet
    relay: Relay
    folder: Path
    ends: list[Ended] = field(default_factory=list)
    connected: list[int] = field(default_factory=list)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def agent(self, program: Program, secret: Secret | None = None) -> subprocess.Popen[bytes]:
        """Start an agent of this node, as srun would."""
        environ = {
            **os.environ,
            ADDRESSES: LOOPBACK,
            PORT: str(self.relay.port),
            TOKEN: (secret or self.fleet.secret).token,
            STEP: str(len(self.agents)),
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "0",
            "SLURMD_NODENAME": NODE,
            SUPERVISED: f"ours:{self.folder}/run",
        }
        command = [sys.executable, "-m", node_agent.__name__, node_agent.program_text(program)]
        self.agents.append(subprocess.Popen(command, env=environ))
        return self.agents[-1]

    def start(self, attempt: int, count: int) -> None:
        """Order ranks."""
        control = Secret("ab" * 32)
        sealed = SealedLaunch.of(Launch(Attempt(attempt, "n"), control), self.fleet.secret)
        order = StartRanks(attempt, sealed, 0, count, count, ("node1", 1))
        self.fleet.order(NODE, order)

    def statuses(self) -> dict[int, int | None]:
        """How ranks have ended."""
        return {end.rank: end.status for end in self.ends}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    ends, connected = list[Ended](), list[int]()

    def hear(node: str, news: FleetNews) -> None:
        ends.extend([news] if isinstance(news, Ended) else [])
        if isinstance(news, RankNews) and isinstance(news.news, Connected):
            connected.append(news.news.rank)

    fleet = Fleet([socket.create_server((LOOPBACK, 0))], 1, hear)
    place = Place(fleet, Relay(fleet.port), tmp_path, ends, connected)
    yield place
    fleet.close()
    for agent in place.agents:
        agent.kill()
        agent.wait()


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Program]:
    """A script of the user's, forked after an import."""

    def make(text: str) -> Program:
        file = tmp_path / "program.py"
        file.write_text(text)
        return Program.of_user([sys.executable, str(file)], ["json"])

    return make


def test_ranks_are_forked_with_their_place_and_their_ends_are_told(
    place: Place, program: Callable[[str], Program]
) -> None:
    agent = place.agent(
        program(
            "import os, sys\n"
            f"assert '{OF_AGENT}' in os.environ and '{TOKEN}' not in os.environ\n"
            "assert os.environ['KEMPNER_CONTROL_TOKEN'] == 'ab' * 32\n"
            "assert os.environ['KEMPNER_FORKED'] and os.environ['WORLD_SIZE'] == '2'\n"
            "assert os.environ['SLURM_PROCID'] == os.environ['LOCAL_RANK']\n"
            "sys.exit(40 + int(os.environ['RANK']))\n"
        )
    )
    place.start(1, 2)
    wait_until(lambda: place.statuses() == {0: 40, 1: 41}, "both have ended", 30)
    place.fleet.close()
    assert agent.wait(scaled(10)) == 0


def test_a_fork_server_that_has_died_is_replaced(
    place: Place, program: Callable[[str], Program]
) -> None:
    agent = place.agent(program("import os, sys\nsys.exit(40 + ('KEMPNER_FORKED' in os.environ))"))
    for attempt in (1, 2, 3):  # that it has died may be noticed in the second
        place.start(attempt, 1)
        wait_until(lambda n=attempt: len(place.ends) == n, "the rank has ended", 30)
        if attempt == 1:
            (server,) = psutil.Process(agent.pid).children()
            server.kill()
            wait_until(lambda pid=server.pid: not psutil.pid_exists(pid), "it was seen", 10)
    assert (place.ends[0].status, place.ends[2].status) == (41, 41)


def test_what_happens_while_the_link_is_broken_is_told_once_it_is_back(
    place: Place, program: Callable[[str], Program], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    place.agent(program(f"open({str(gate)!r}).read(); raise SystemExit(3)"))
    place.start(1, 1)
    writer = gate.open("w")  # returns once the rank reads
    place.relay.cut()
    gone = lambda: (seen := place.fleet.seen.get(NODE)) is not None and not seen.linked  # noqa: E731
    wait_until(gone, "the link is over", 10)
    writer.close()
    place.fleet.order(NODE, KillRanks(1))
    place.relay.whole = True
    cleared = lambda: (seen := place.fleet.seen.get(NODE)) is not None and seen.cleared == 1  # noqa: E731
    wait_until(cleared, "the agent has cleared up", 10)
    assert len(place.ends) == 1
    assert place.agents[0].poll() is None


RANKS = """
import os, signal, threading
from pathlib import Path
from kempner.run.control.client import ControlClient, Reactions
from kempner.run.control.heartbeat import Progress
from kempner.run.control.launch_env import Launch
from kempner.run.record.run_dir import RunDirectory

rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: rank == 2 or os._exit(70 + rank))
if rank == 0:
    stop = lambda order: Path(order.reason.name).touch()
    react = Reactions(stop, print, print, 100.0, 100.0)
    launch = Launch.from_environment(os.environ)
    ControlClient(launch, RunDirectory(Path()), rank, Progress(), react).start()
open(READY, "w").write("x")
while True:
    signal.pause()
"""


def test_a_stop_reaches_a_rank_once_as_an_order_or_else_as_a_signal(
    place: Place, program: Callable[[str], Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    place.agent(program(RANKS.replace("READY", repr(str(ready)))))

    def start(attempt: int) -> None:
        place.start(attempt, 3)
        said = ""
        while len(said) < 3:
            said += ready.read_text()
        wait_until(lambda: place.connected.count(0) == attempt, "rank 0 listens", 20)

    start(1)
    place.fleet.tell_ranks(TellRanks(1, Stop(StopReason.GROW)), None)
    wait_until((tmp_path / "GROW").exists, "rank 0 has heard", 10)
    place.fleet.order(NODE, KillRanks(1))
    wait_until(lambda: len(place.ends) == 3, "all are killed", 10)
    assert set(place.statuses().values()) == {-9}, "to go on elsewhere is no signal"
    place.ends.clear()
    start(2)
    place.fleet.tell_ranks(TellRanks(2, Stop(StopReason.SIGNAL)), None)
    wait_until((tmp_path / "SIGNAL").exists, "rank 0 has heard", 10)
    wait_until(lambda: place.statuses() == {1: 71}, "rank 1 stops", 10)
    place.fleet.order(NODE, KillRanks(2))
    wait_until(lambda: len(place.ends) == 3, "the others are killed", 10)
    assert place.statuses() == {0: -9, 1: 71, 2: -9}, "rank 0 was told, and not signalled"
    assert [end.sent for end in place.ends] == ["stop", "kill", "kill"]


def test_an_agent_answers_for_its_node_while_its_ranks_work(
    place: Place, program: Callable[[str], Program], tmp_path: Path
) -> None:
    agent = place.agent(program("import time; time.sleep(600)"))
    place.start(1, 1)
    (tmp_path / "health").mkdir()
    (tmp_path / "health" / MARK).write_text("n")
    about = question_text(ProbeQuestion("n", (str(tmp_path / "health"),), None, True))
    asked = {NODE: Question(about=about, pids=(agent.pid, 2**22), look=(agent.pid, 2**22))}
    answers = place.fleet.ask(asked, 30, lambda node: False)
    vitals = read_result(answers[NODE].vitals)
    assert vitals is not None
    assert (vitals.node, vitals.troubles) == (NODE, {})
    assert answers[NODE].left == (agent.pid,)
    there, gone = answers[NODE].seen
    assert f"process {agent.pid}: State: " in there
    assert "No such file" in gone


class Alone:
    """A link whose supervisor was gone before a stop is asked for, and not yet for long."""

    ranks: Any = None

    def start(self) -> None: ...

    def alone_for(self) -> float:
        return (node_agent.ALONE_AT_A_STOP + node_agent.ALONE) / 2

    def say(self, message: object) -> None: ...

    def post(self, make: object) -> None: ...


def test_without_its_supervisor_and_ranks_an_agent_does_not_hold_up_a_job_that_stops() -> None:
    children = MagicMock(Children)
    children.alive.return_value = False
    program = Program.of_user(["true"], [])
    agent = node_agent.NodeAgent(program, children, MagicMock(), Secret.new(), [LOOPBACK])
    runs = threading.Thread(target=agent.run, args=(Alone(),), daemon=True)
    runs.start()
    agent.take_signal(ReceivedSignal(signal.SIGTERM, 0.0))
    runs.join(scaled(10))
    assert not runs.is_alive()


def test_who_does_not_know_the_secret_is_no_agent(
    place: Place, program: Callable[[str], Program]
) -> None:
    place.agent(program(""), secret=Secret.new())
    right = place.agent(program(""))
    wait_until(lambda: place.fleet.seen.get(NODE) is not None, "the right one is there", 30)
    seen = place.fleet.seen.get(NODE)
    assert seen is not None
    assert seen.pid == right.pid


def test_a_token_travels_under_a_pad() -> None:
    secret, token = Secret.new(), Secret.new().token
    sealed = secret.seal(token)
    assert secret.unseal(sealed) == token
    assert token not in sealed
    assert sealed != secret.seal(token)
    assert Secret.new().unseal(sealed) != token


@pytest.mark.parametrize(("cpus", "ranks"), [(range(8), 4), (range(7), 3), ((1, 5, 9), 2)])
def test_each_rank_gets_cpus_of_its_own(cpus: range | tuple[int, ...], ranks: int) -> None:
    dealt = shares(cpus, ranks)
    assert sorted(cpu for share in dealt for cpu in share) == sorted(cpus)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert len(dealt) == ranks


def test_too_few_cpus_are_shared() -> None:
    assert shares({3}, 2) == [(), ()]
