"""What the supervisor spends on the links of a large run: 16,384 ranks over 2,048 agents.

    python benchmarks/control_plane.py [--agents 2048] [--ranks 8] [--seconds 20] [--callers 4]

Agents are simulated in a few processes over loopback; they open their links, prove who they are,
and say what real ones say, for eight ranks each. The supervisor's side is real: `Fleet` and
`RankChannel`, alone in this process. Measured are its processor time until it has admitted all
agents, then all ranks; the share of a core that it takes while each rank reports once a second;
and the seconds from a stop to the last agent that has it, with those in which a real agent has told
eight real ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from kempner.cluster.machine import raise_open_file_limit
from kempner.run.control.client import ControlClient, Reactions
from kempner.run.control.heartbeat import Progress
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import (
    Connected,
    Phase,
    RankNews,
    Report,
    Stop,
    SummedReports,
    TellRanks,
)
from kempner.run.link.auth import AGENTS, Door, Secret
from kempner.run.link.messages import Caller, Role, encode
from kempner.run.link.wire import Connection, connect, listen
from kempner.run.process.exit_codes import StopReason
from kempner.run.record.attempts import Attempt
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.rank_connections import RankChannel
from kempner.supervisor.control.rank_hub import RankHub
from kempner.supervisor.launchers.agents.fleet import Fleet, FleetNews

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import records

PROVES = ("kempner/run/link", "kempner/run/control", "kempner/supervisor/control")
LOOPBACK, ATTEMPT, WITHIN = "127.0.0.1", 1, 600.0


class Agents:
    """The agents that one process plays, each with a connection of its own and `ranks` ranks."""

    def __init__(self, port: int, token: str, nodes: range, ranks: int) -> None:
        door = Door(Secret(token), AGENTS)
        self._firsts = [n * ranks for n in nodes]
        self._ranks = ranks
        self.lines = [
            door.open(connect((LOOPBACK,), port), Caller(Role.AGENT, 0, n, f"node{n}", 1))
            for n in nodes
        ]
        self._by_fd = {line.fileno(): line for line in self.lines}
        self._poll = select.epoll()
        for line in self.lines:
            self._poll.register(line.fileno(), select.EPOLLIN)

    def listen(self, seconds: float) -> Iterator[tuple[Connection, bytes]]:
        """What comes within some time, of any of them."""
        for fd, _ in self._poll.poll(max(0.0, seconds)):
            for line in self._by_fd[fd].lines():
                yield self._by_fd[fd], line

    def join(self) -> None:
        """Each says that its ranks are there, as they come."""
        for rank in range(self._ranks):
            for wire, first in zip(self.lines, self._firsts, strict=True):
                there = Connected(first + rank, f"node{first // self._ranks}", 1)
                wire.send(RankNews(ATTEMPT, there))

    def report(self, seconds: float) -> None:
        """Each says once a second where its ranks are, evenly spread, and reads what comes."""
        begin, count = time.monotonic(), 0
        reports = [self._summary(first) for first in self._firsts]
        while (now := time.monotonic()) - begin < seconds:
            due = int((now - begin) * len(self.lines))
            while count < due:
                n = count % len(self.lines)
                self.lines[n].send_line(reports[n])
                count += 1
            for _ in self.listen(0.005):
                pass

    def _summary(self, first: int) -> bytes:
        ranks = range(first, first + self._ranks)
        report = {rank: Report(7, Phase.STEP, 7.5 + rank / 1e5, 0.5) for rank in ranks}
        return encode(SummedReports(ATTEMPT, report, {}))

    def hear_stop(self) -> None:
        """Until the last of them was told to stop."""
        left = set(map(id, self.lines))
        while left:
            for wire, line in self.listen(1.0):
                if b'"stop"' in line:
                    left.discard(id(wire))


def play(orders: Pipe, port: int, token: str, share: range, ranks: int) -> None:
    """Do what the measuring process says, and tell it when that was done (`time.monotonic`)."""
    raise_open_file_limit()
    agents: Agents | None = None
    while (order := orders.recv()) is not None:
        what, seconds = order
        if agents is None:
            agents = Agents(port, token, share, ranks)
        elif what == "join":
            agents.join()
        elif what == "report":
            agents.report(seconds)
        else:
            agents.hear_stop()
        orders.send(time.monotonic())
    os._exit(0)


class Players:
    """The processes that play the agents, a share each."""

    def __init__(self, port: int, token: str, shares: list[range], ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        for share in shares:
            near, far = context.Pipe()
            args = (far, port, token, share, ranks)
            context.Process(target=play, args=args, daemon=True).start()
            self._pipes.append(near)

    def order(self, what: str, seconds: float = 0.0) -> Callable[[], float]:
        """Have them do something; the function returned waits until it is done, and returns the
        latest time that one of them tells."""
        for pipe in self._pipes:
            pipe.send((what, seconds))
        return lambda: max(float(pipe.recv()) for pipe in self._pipes)

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


class Rank:
    """A real one, which notes when it is told to stop."""

    def __init__(self, hub_socket: str, secret: Secret, rank: int, run: RunDirectory) -> None:
        self.stopped_at = 0.0
        launch = Launch(Attempt(ATTEMPT, "n"), secret, hub_socket)
        nothing = Reactions(self._stop, lambda seconds: None, lambda seconds: None, 600.0, 600.0)
        self.link = ControlClient(launch, run, rank, Progress(), nothing)
        self.link.start()

    def _stop(self, order: Stop) -> None:
        self.stopped_at = time.monotonic()


def pass_on_a_stop(ranks: int, run: RunDirectory) -> float:
    """Seconds in which an agent has told each of its ranks, which are real."""
    joined, secret = list[object](), Secret.new()
    hub = RankHub(lambda said: joined.append(said) if isinstance(said, RankNews) else None, True)
    socket_name = hub.begin(ATTEMPT, ranks, secret)
    told = [Rank(socket_name, secret, rank, run) for rank in range(ranks)]
    wait_until(lambda: len(joined) == ranks, "the ranks of one agent")
    began = time.monotonic()
    hub.pass_on(TellRanks(ATTEMPT, STOP))
    wait_until(lambda: all(rank.stopped_at for rank in told), "their stop")
    hub.end()
    return max(rank.stopped_at for rank in told) - began


STOP = Stop(StopReason.SIGNAL, "SIGTERM", 100.0)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WITHIN
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come about within {WITHIN:.0f} s")
        time.sleep(0.05)


@contextmanager
def cpu(row: dict[str, object], name: str) -> Iterator[None]:
    """Add the processor seconds that this process spends in the block."""
    before = time.process_time()
    yield
    row[name] = round(time.process_time() - before, 2)


def measure(
    agents: int, ranks: int, seconds: float, callers: int, folder: Path
) -> dict[str, object]:
    """One run of all."""
    size, run = agents * ranks, RunDirectory(folder)
    run.attempt(ATTEMPT).mkdir(parents=True)
    joined, heard = set[int](), Counter[type]()

    def hear(node: str, news: FleetNews) -> None:
        heard[type(news)] += 1
        if isinstance(news, RankNews | SummedReports):
            channel.hear(node, news)

    fleet = Fleet(listen([LOOPBACK], None), agents, hear)
    channel = RankChannel(ATTEMPT, size, lambda news: joined.add(news.rank), fleet.tell_ranks)
    shares = [range(n * agents // callers, (n + 1) * agents // callers) for n in range(callers)]
    players = Players(fleet.port, fleet.secret.token, shares, ranks)
    row: dict[str, object] = {"agents": agents, "ranks": size}
    nodes = [f"node{n}" for n in range(agents)]
    with cpu(row, "all agents admitted, CPU s"):
        done = players.order("open")
        wait_until(lambda: all(fleet.seen.get(node) for node in nodes), "the agents")
        done()
    with cpu(row, "all ranks admitted, CPU s"):
        done = players.order("join")
        wait_until(lambda: len(joined) == size, "the ranks")
        done()
    before = time.process_time()
    players.order("report", seconds)()
    # By what was heard: a machine with other work to do may not send or hear all in the time.
    each = (time.process_time() - before) / heard[SummedReports]
    row["a report a second, % of a core"] = round(100 * each * agents, 1)
    row["of the reports heard meanwhile, %"] = round(100 * heard[SummedReports] / agents / seconds)
    wait_until(lambda: len(channel.last_reports()) == size, "the reports")
    done, began = players.order("stop"), time.monotonic()
    channel.tell(STOP)
    to_agents = done() - began
    row["a stop to all, s"] = round(to_agents + pass_on_a_stop(ranks, run), 2)
    players.end()
    fleet.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8, help="of each agent")
    parser.add_argument("--seconds", type=float, default=20.0, help="of reports")
    parser.add_argument("--callers", type=int, default=4, help="processes that play agents")
    records.add_option(parser)
    arguments = parser.parse_args()
    raise_open_file_limit()
    socket.setdefaulttimeout(WITHIN)
    with tempfile.TemporaryDirectory() as folder:
        row = measure(
            arguments.agents,
            arguments.ranks,
            arguments.seconds,
            arguments.callers,
            Path(folder) / "run",
        )
    records.result(arguments.record, "control plane", PROVES, [row])


if __name__ == "__main__":
    main()
