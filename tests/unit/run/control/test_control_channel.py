"""Both ends of the control channel over real sockets: ranks join, report, obey and leave."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from callers import LOOPBACK, SIZE, Relay, Stranger, Supervisor, introduce
from harness import wait_until
from patience import scaled

from kempner.run.control import client
from kempner.run.control.protocol import (
    Connected,
    Disconnected,
    DumpStacks,
    Event,
    Outcome,
    PeerLost,
    Phase,
    RankMessage,
    Stop,
    TellRanks,
)
from kempner.run.link import auth
from kempner.run.link import server as channel_module
from kempner.run.link.messages import Welcome, encode
from kempner.run.link.wire import connect, listen, listen_here
from kempner.run.process.exit_codes import ExitCode, StopReason, UsageError
from kempner.run.record.events import Resumed, Signalled, StartedAnew

OTHER, SILENT = "127.0.0.7", "127.0.0.8"


def test_a_rank_joins_reports_and_leaves(supervisor: Supervisor) -> None:
    rank = supervisor.link(2)
    joined = supervisor.expect(Connected)
    assert joined == Connected(2, socket.gethostname(), joined.pid)
    rank.progress.made(17)
    rank.progress.phase = Phase.EVAL
    report = wait_until(
        lambda: (
            (s := supervisor.channel.last_reports().get(2)) and s.report.step == 17 and s.report
        ),
        "the report",
    )
    assert report.phase is Phase.EVAL
    for step in range(50):
        rank.link.record(Resumed(step))
    assert rank.link.leave(ExitCode.STOPPED, "enough") == []
    heard = [supervisor.expect(RankMessage).message for _ in range(51)]
    assert [m.fields["step"] for m in heard[:-1]] == list(range(50))
    assert heard[-1] == Outcome(51, 75, "enough")


def test_orders_reach_all_one_and_those_that_come_later(supervisor: Supervisor) -> None:
    first, second = supervisor.link(0), supervisor.link(1)
    supervisor.expect(Connected), supervisor.expect(Connected)
    supervisor.channel.tell(Stop(StopReason.CANCEL, "only you"), rank=1)
    assert second.stops.get(timeout=scaled(20)) == Stop(StopReason.CANCEL, "only you")
    supervisor.channel.tell(Stop(StopReason.SIGNAL, "SIGTERM", 100.0))
    assert first.stops.get(timeout=scaled(20)) == Stop(StopReason.SIGNAL, "SIGTERM", 100.0)
    assert second.stops.get(timeout=scaled(20)) == Stop(StopReason.SIGNAL, "SIGTERM", 100.0)
    late = supervisor.link(2).stops.get(timeout=scaled(20))
    assert late.reason is StopReason.SIGNAL
    assert late.seconds_left is not None
    assert late.seconds_left < 100.0
    assert first.stops.empty()


def test_an_order_ends_the_pause_of_a_busy_listener(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = supervisor.link(0)
    supervisor.expect(Connected)
    pauses, listener = threading.Event(), supervisor.agent.ranks._server
    assert listener is not None
    real = listener._pause

    class Pause:
        def poll(self, milliseconds: int) -> None:
            first = not pauses.is_set()
            pauses.set()
            real.poll(3_600_000 if first else milliseconds)

    monkeypatch.setattr(listener, "_pause", Pause())
    monkeypatch.setattr(channel_module, "_BUSY", -1)
    assert pauses.wait(scaled(20))
    supervisor.agent.ranks.pass_on(TellRanks(3, Stop(StopReason.CANCEL, "now")))
    assert rank.stops.get(timeout=scaled(20)) == Stop(StopReason.CANCEL, "now")


def test_the_newest_connection_of_a_rank_counts(supervisor: Supervisor) -> None:
    older, newer = Stranger(supervisor.socket), Stranger(supervisor.socket)
    for number, stranger in enumerate((older, newer), 1):
        stranger.say(introduce(supervisor.launch(), 0, stranger.challenge()))
        supervisor.expect(Connected)
        assert isinstance(stranger.hear(), Welcome)
        stranger.say(Event(number, "x", {}))
        assert supervisor.expect(RankMessage).message.number == number
    newer.say(Event(2, "sent again", {}))  # its answer was lost, say
    newer.say(Outcome(3, 0, ""))
    assert supervisor.expect(RankMessage).message == Outcome(3, 0, "")
    older.stream.readline()
    assert older.is_hung_up_on()
    newer.socket.shutdown(socket.SHUT_RDWR)
    assert supervisor.expect(Disconnected).rank == 0  # one of the two only
    assert supervisor.news.empty()


def test_what_was_not_heard_is_said_again_to_the_next_connection(supervisor: Supervisor) -> None:
    """Through a relay that swallows every answer, then breaks, then lets all through."""
    with Relay(supervisor.socket) as relay:
        rank = supervisor.link(0, through=relay.name)
        supervisor.expect(Connected)
        wait_until(supervisor.channel.last_reports, "the opening to be over")
        relay.swallow.set()
        rank.link.record(StartedAnew())
        assert supervisor.expect(RankMessage).message.name == "started"
        relay.cut()
        rank.link.record(Signalled())
        assert supervisor.expect(Disconnected).rank == 0
        supervisor.expect(Connected)
        assert (
            supervisor.expect(RankMessage).message.name == "signalled"
        )  # and not the first one again
        assert rank.link.leave(0, "") == []
        assert supervisor.expect(RankMessage).message == Outcome(3, 0, "")


def test_the_words_of_a_rank_that_is_gone_already_are_all_taken_in(supervisor: Supervisor) -> None:
    for rank in range(SIZE):
        hasty = Stranger(supervisor.socket)
        hello = introduce(supervisor.launch(), rank, hasty.challenge())
        hasty.say(hello)
        supervisor.expect(Connected)
        assert isinstance(hasty.hear(), Welcome)
        hasty.say(b"".join(encode(Event(n, "x", {"long": "y" * 900})) for n in range(1, 101)))
        hasty.wait_until_all_is_sent()
        hasty.socket.shutdown(socket.SHUT_RD)  # from here on an answer is met with a reset
        hasty.stream.close()
        hasty.socket.close()
        assert [supervisor.expect(RankMessage).message.number for _ in range(100)] == list(
            range(1, 101)
        )
        assert supervisor.expect(Disconnected).rank == rank


def test_an_order_after_the_end_is_for_nobody(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.close()
    supervisor.channel.tell(Stop(StopReason.SIGNAL, "too late", 1.0))


def test_the_handshake_counts_as_a_word(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that took long to connect, because it imported, say, has not been left alone."""
    monkeypatch.setattr(channel_module, "TICK", 1000.0)  # nothing else is said
    rank = supervisor.link(0)
    assert supervisor.expect(Connected).rank == 0
    wait_until(lambda: rank.link._deadlines.supervisor.times_heard, "a word")


def test_silence_is_noticed_and_ends_when_somebody_speaks(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "PATIENCE", 0.2)
    monkeypatch.setattr(client, "LAST_WORDS", 0.5)
    with listen_here("mute"):  # accepts, like a stopped process's kernel
        rank = supervisor.link(0, patience=0.5, socket="mute")
        assert rank.silences.get(timeout=scaled(20)) >= 0.5
        assert rank.standstills.get(timeout=scaled(20)) >= 0.5
        rank.link.record(Signalled())
        assert [e.name for e in rank.link.leave(75, "")] == ["signalled"]
    assert rank.silences.empty()  # said once
    assert rank.standstills.empty()


STUCK = """
import json, sys, threading, time
from pathlib import Path
from kempner.run.output import logs
from kempner.run.control.launch_env import Launch
from kempner.run.record.run_dir import RunDirectory
from kempner.run.control.client import ControlClient, Reactions
from kempner.run.control.heartbeat import Progress
react = Reactions(lambda stop: None, lambda seconds: None, lambda seconds: None, 60.0, 60.0)
run = RunDirectory(Path(sys.argv[1]))
ControlClient(Launch.from_environment(), run, 1, Progress(), react).start()
threading.Lock().acquire() and threading.Event().wait()
"""


def test_a_lost_peer_ends_a_process_whose_main_thread_is_stuck(supervisor: Supervisor) -> None:
    stuck = subprocess.Popen(
        [sys.executable, "-c", STUCK, supervisor.run.path],
        env=supervisor.launch().environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    supervisor.expect(Connected)
    supervisor.channel.tell(DumpStacks())
    stacks = supervisor.run.stacks(3, 1)
    wait_until(lambda: stacks.exists() and "wait" in stacks.read_text(), "the stacks")
    supervisor.channel.tell(PeerLost(0, "was killed by SIGKILL"))
    words = supervisor.expect(RankMessage).message
    assert words == Outcome(1, 76, "exited, because rank 0 was killed by SIGKILL")
    _, said = stuck.communicate(timeout=scaled(20))
    assert stuck.returncode == 76
    assert "rank 0 was killed by SIGKILL" in said


def test_ports_are_taken_from_the_range_and_a_full_range_is_named() -> None:
    (taken,) = listen([LOOPBACK], None)
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"ports {port} to {port} .*supervise\.control_ports"):
            listen([OTHER, LOOPBACK], range(port, port + 1))
        first, second = listen([OTHER, LOOPBACK], range(port, port + 20))
        with first, second:  # on the same port, though the first was free on one of them
            assert first.getsockname()[1] == second.getsockname()[1]
            assert port < first.getsockname()[1] < port + 20


@pytest.mark.parametrize(
    "addresses", [(LOOPBACK,), (OTHER, LOOPBACK), (LOOPBACK, OTHER), (SILENT, OTHER, LOOPBACK)]
)
def test_the_first_address_that_answers_is_taken(addresses: tuple[str, ...]) -> None:
    (listener,) = listen([LOOPBACK], None)
    port = listener.getsockname()[1]
    with listener, silent(SILENT, port), connect(addresses, port) as connection:
        assert connection.getpeername() == (LOOPBACK, port)


def test_where_nobody_listens_any_more_is_told_from_where_nothing_answers() -> None:
    """A rank takes a supervisor that refuses for one that may have died."""
    (listener,) = listen([LOOPBACK], None)
    port = listener.getsockname()[1]
    listener.close()
    with silent(SILENT, port):
        for addresses in ((LOOPBACK,), (LOOPBACK, SILENT), (SILENT, LOOPBACK)):
            with pytest.raises(ConnectionRefusedError):
                connect(addresses, port)
        with pytest.raises(TimeoutError):
            connect((SILENT,), port)


@contextmanager
def silent(address: str, port: int) -> Iterator[None]:
    """Calls there are not answered, as on a network that drops them: the queue is full."""
    with ExitStack() as held:
        full = held.enter_context(socket.socket())
        full.bind((address, port))
        full.listen(0)
        for _ in range(2):
            caller = held.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((address, port))
        yield
