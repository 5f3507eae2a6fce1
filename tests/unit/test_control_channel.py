"""Both ends of the control channel over real sockets, among honest ranks and hostile strangers."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kempner.run import link as link_module
from kempner.run import logs, opening
from kempner.run.attempts import Attempt
from kempner.run.exit_codes import ExitCode, UsageError
from kempner.run.launch import Control, Launch
from kempner.run.layout import RunDirectory
from kempner.run.ledger import read_lines
from kempner.run.link import Link, Reactions
from kempner.run.messages import (
    LINE_LIMIT,
    Challenge,
    DumpStacks,
    Event,
    FromRank,
    FromSupervisor,
    Hello,
    Outcome,
    PeerLost,
    Phase,
    Report,
    Secret,
    Stop,
    Welcome,
    decode_from_rank,
    decode_from_supervisor,
    encode,
)
from kempner.run.opening import introduce, open_wire
from kempner.run.progress import Progress
from kempner.supervisor import channel as channel_module
from kempner.supervisor.admission import Membership, listen
from kempner.supervisor.channel import Channel
from kempner.supervisor.file_channel import FileChannel
from kempner.supervisor.news import Heard, Joined, News, Parted

SIZE = 4
LOOPBACK = "127.0.0.1"


class Supervisor:
    """A channel of attempt 3 over four ranks, and what it hands on."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder / "run")
        self.run.attempt(3).mkdir(parents=True)
        logs.configure()
        logs.open_log(self.run.supervisor_log(3))
        self.secret = Secret.new()
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        members = Membership(self.secret, attempt=3, size=SIZE)
        files = FileChannel(self.run, 3, SIZE)
        self.channel = Channel(listen(LOOPBACK, None), members, files, self.news.put)
        self.channel.start()
        self.links: list[Link] = []

    def close(self) -> None:
        """End both sides; nobody is left to call at a port that somebody else may get."""
        for link in self.links:
            link.leave(0, "")
        self.channel.close()

    def launch(self, **changes: Any) -> Launch:
        control = Control(LOOPBACK, self.channel.port, self.secret)
        return Launch(Attempt(3, "abcd"), replace(control, **changes))

    def link(self, rank: int, patience: float = 60.0, **changes: Any) -> LinkedRank:
        return LinkedRank(self, rank, patience, **changes)

    def expect(self, kind: type[News]) -> Any:
        """The next news, which must be of this kind."""
        news = self.news.get(timeout=20)
        assert isinstance(news, kind), news
        return news

    def refusals(self) -> list[str]:
        log = read_lines(self.run.supervisor_log(3))
        return [line["reason"] for line in log if line["event"] == "connection refused"]


class LinkedRank:
    """A rank's link in this process, and what it was told."""

    def __init__(self, supervisor: Supervisor, rank: int, patience: float, **changes: Any) -> None:
        self.progress = Progress()
        self.stops: queue.SimpleQueue[Stop] = queue.SimpleQueue()
        self.silences: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.standstills: queue.SimpleQueue[float] = queue.SimpleQueue()
        react = Reactions(
            self.stops.put, self.silences.put, self.standstills.put, patience, patience
        )
        launch = supervisor.launch(**changes)
        self.link = Link(launch, supervisor.run, rank, self.progress, react)
        self.link.start()
        supervisor.links.append(self.link)


class Stranger:
    """A connection without manners."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((LOOPBACK, port), timeout=20)
        self.stream = self.socket.makefile("rb")

    def hear(self) -> FromSupervisor:
        return decode_from_supervisor(self.stream.readline())

    def challenge(self) -> str:
        message = self.hear()
        assert isinstance(message, Challenge)
        return message.nonce

    def say(self, content: bytes | FromRank) -> None:
        self.socket.sendall(content if isinstance(content, bytes) else encode(content))

    def is_hung_up_on(self) -> bool:
        try:
            return self.stream.read() == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(channel_module, "TICK", 0.1)
    supervisor = Supervisor(tmp_path)
    yield supervisor
    monkeypatch.setattr(link_module, "LAST_WORDS", 0.0)
    supervisor.close()


def test_a_rank_joins_reports_and_leaves(supervisor: Supervisor) -> None:
    rank = supervisor.link(2)
    joined = supervisor.expect(Joined)
    assert joined == Joined(2, socket.gethostname(), joined.pid)
    rank.progress.step, rank.progress.phase = 17, Phase.EVAL
    report = wait_until(
        lambda: (s := supervisor.channel.sightings().get(2)) and s.report.step == 17 and s.report,
        "the report",
    )
    assert report.phase is Phase.EVAL
    for step in range(50):
        rank.link.record("saved", {"step": step})
    assert rank.link.leave(ExitCode.STOPPED, "enough") == []
    heard = [supervisor.expect(Heard).message for _ in range(51)]
    assert [m.fields["step"] for m in heard[:-1]] == list(range(50))
    assert heard[-1] == Outcome(51, 75, "enough")


def test_orders_reach_all_one_and_those_that_come_later(supervisor: Supervisor) -> None:
    first, second = supervisor.link(0), supervisor.link(1)
    supervisor.expect(Joined), supervisor.expect(Joined)
    supervisor.channel.tell(Stop("only you"), rank=1)
    assert second.stops.get(timeout=20) == Stop("only you")
    supervisor.channel.tell(Stop("SIGTERM", 100.0))
    assert first.stops.get(timeout=20) == Stop("SIGTERM", 100.0)
    assert second.stops.get(timeout=20) == Stop("SIGTERM", 100.0)
    late = supervisor.link(2).stops.get(timeout=20)
    assert late.reason == "SIGTERM"
    assert late.seconds_left is not None
    assert late.seconds_left < 100.0
    assert first.stops.empty()


def impostors(s: Supervisor) -> dict[str, tuple[Launch, int]]:
    """Launches and ranks that are none of this supervisor's."""
    other = replace(s.launch(), attempt=Attempt(2, "abcd"))
    return {
        "it does not know the token": (s.launch(secret=Secret.new()), 0),
        "it belongs to attempt 2": (other, 0),
        "it calls itself rank 4 of 4": (s.launch(), SIZE),
    }


def test_impostors_are_refused_with_a_reason(supervisor: Supervisor) -> None:
    for launch, rank in impostors(supervisor).values():
        with pytest.raises(OSError, match="closed by the other side"):
            open_wire(launch, rank)
    stranger = Stranger(supervisor.channel.port)
    hello = introduce(supervisor.launch(), 0, stranger.challenge())
    stranger.say(replace(hello, version=2))
    assert stranger.is_hung_up_on()
    wait_until(lambda: len(supervisor.refusals()) == 4, "the reasons")
    reasons = [*impostors(supervisor), "it speaks version 2 of the protocol, this is 1"]
    assert supervisor.refusals() == reasons
    assert supervisor.news.empty()


def test_a_proof_cannot_be_used_again(supervisor: Supervisor) -> None:
    first, second = Stranger(supervisor.channel.port), Stranger(supervisor.channel.port)
    overheard = introduce(supervisor.launch(), 0, first.challenge())
    first.say(overheard)
    assert isinstance(first.hear(), Welcome)
    second.challenge()
    second.say(overheard)
    assert second.is_hung_up_on()


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
        b"x" * 3000,
        b"x" * 10 * LINE_LIMIT,
        encode(Report(1, Phase.STEP, 0.0, 0.0)),
        encode(Event(1, "ledger", {})),
    ],
)
def test_strangers_are_hung_up_on(supervisor: Supervisor, content: bytes) -> None:
    stranger = Stranger(supervisor.channel.port)
    stranger.challenge()
    with suppress(OSError):  # it may hang up before all is said
        stranger.say(content)
    assert stranger.is_hung_up_on()
    assert supervisor.news.empty()


@pytest.mark.parametrize(
    "content", [b"{}\n", b"x" * (LINE_LIMIT + 1), b'{"kind":"stop","reason":"me"}\n']
)
def test_a_rank_that_talks_nonsense_loses_its_connection_only(
    supervisor: Supervisor, content: bytes
) -> None:
    other = supervisor.link(1)
    supervisor.expect(Joined)
    stranger = Stranger(supervisor.channel.port)
    stranger.say(introduce(supervisor.launch(), 0, stranger.challenge()))
    supervisor.expect(Joined)
    assert isinstance(stranger.hear(), Welcome)
    stranger.say(content)
    assert supervisor.expect(Parted).rank == 0
    other.link.record("still here", {})
    assert supervisor.expect(Heard).rank == 1


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path_factory.mktemp("lasting"))
    yield supervisor
    supervisor.close()


@given(st.lists(st.binary(max_size=200) | st.just(b"\n"), max_size=5), st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_no_bytes_whatsoever_disturb_it(
    lasting: Supervisor, chunks: list[bytes], abruptly: bool
) -> None:
    stranger = Stranger(lasting.channel.port)
    if abruptly:  # a reset instead of an orderly end
        stranger.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with suppress(OSError):
        for chunk in chunks:
            stranger.say(chunk)
    stranger.stream.close()
    stranger.socket.close()
    wire = open_wire(lasting.launch(), 0)  # an honest rank gets in
    wire.close()


def test_half_open_connections_do_not_keep_ranks_out(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "STRANGERS", 4)
    idle = [Stranger(supervisor.channel.port) for _ in range(3 * SIZE)]
    rank = supervisor.link(0)
    assert supervisor.expect(Joined).rank == 0
    assert idle[0].hear()
    assert idle[0].is_hung_up_on()
    rank.link.record("here", {})
    supervisor.expect(Heard)


def test_who_never_says_who_it_is_has_to_go(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "OPENING_TIME", 0.0)
    stranger = Stranger(supervisor.channel.port)
    stranger.challenge()
    assert stranger.is_hung_up_on()
    wait_until(supervisor.refusals, "the reason")
    assert supervisor.refusals() == ["it did not say who it is"]


def test_a_rank_that_does_not_read_is_given_up_and_the_others_hear_all(
    supervisor: Supervisor,
) -> None:
    deaf = Stranger(supervisor.channel.port)
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.say(introduce(supervisor.launch(), 0, deaf.challenge()))
    supervisor.expect(Joined)
    rank = supervisor.link(1)
    supervisor.expect(Joined)
    long = "x" * 4000
    told = 0
    while supervisor.news.empty():
        for _ in range(100):
            supervisor.channel.tell(Stop(long, float(told)), rank=0)
        supervisor.channel.tell(Stop("next", float(told)), rank=1)
        assert rank.stops.get(timeout=20).seconds_left == float(told)
        told += 1
        assert told < 1000
    assert supervisor.expect(Parted) == Parted(0, "it does not read what it is sent")


def test_the_newest_connection_of_a_rank_counts(supervisor: Supervisor) -> None:
    older, newer = Stranger(supervisor.channel.port), Stranger(supervisor.channel.port)
    for number, stranger in enumerate((older, newer), 1):
        stranger.say(introduce(supervisor.launch(), 0, stranger.challenge()))
        supervisor.expect(Joined)
        assert isinstance(stranger.hear(), Welcome)
        stranger.say(Event(number, "x", {}))
        assert supervisor.expect(Heard).message.number == number
    newer.say(Event(2, "sent again", {}))  # its answer was lost, say
    newer.say(Outcome(3, 0, ""))
    assert supervisor.expect(Heard).message == Outcome(3, 0, "")
    older.stream.readline()
    assert older.is_hung_up_on()
    newer.socket.shutdown(socket.SHUT_RDWR)
    assert supervisor.expect(Parted).rank == 0  # one of the two only
    assert supervisor.news.empty()


def test_what_was_not_heard_is_said_again_to_the_next_connection(supervisor: Supervisor) -> None:
    """Through a relay that swallows every answer, then breaks, then lets all through."""
    with Relay(supervisor.channel.port) as relay:
        rank = supervisor.link(0, port=relay.port)
        supervisor.expect(Joined)
        wait_until(supervisor.channel.sightings, "the opening to be over")
        relay.swallow.set()
        rank.link.record("a", {})
        assert supervisor.expect(Heard).message.name == "a"
        relay.cut()
        rank.link.record("b", {})
        assert supervisor.expect(Parted).rank == 0
        supervisor.expect(Joined)
        assert supervisor.expect(Heard).message.name == "b"  # and not "a" once more
        assert rank.link.leave(0, "") == []
        assert supervisor.expect(Heard).message == Outcome(3, 0, "")


def test_the_words_of_a_rank_that_is_gone_already_are_all_taken_in(supervisor: Supervisor) -> None:
    for rank in range(SIZE):
        hasty = Stranger(supervisor.channel.port)
        hello = introduce(supervisor.launch(), rank, hasty.challenge())
        hasty.say(hello)
        supervisor.expect(Joined)
        assert isinstance(hasty.hear(), Welcome)
        hasty.say(b"".join(encode(Event(n, "x", {"long": "y" * 900})) for n in range(1, 101)))
        hasty.socket.shutdown(socket.SHUT_RD)  # from here on an answer is met with a reset
        hasty.stream.close()
        hasty.socket.close()
        assert [supervisor.expect(Heard).message.number for _ in range(100)] == list(range(1, 101))
        assert supervisor.expect(Parted).rank == rank


class Relay:
    """Stands between a rank and its supervisor, for as long as it likes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        self.swallow = threading.Event()
        self._ends: list[socket.socket] = []

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._listener.close()

    def cut(self) -> None:
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()
        self.swallow.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection((LOOPBACK, self._target))
            except OSError:
                return
            self._ends += [near, far]
            for source, target, answers in ((near, far, False), (far, near, True)):
                args = (source, target, answers)
                threading.Thread(target=self._pass_on, args=args, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while content := source.recv(65536):
                if not (answers and self.swallow.is_set()):
                    target.sendall(content)
        except OSError:
            return


def test_an_order_after_the_end_is_for_nobody(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.close()
    supervisor.channel.tell(Stop("too late", 1.0))


def test_a_false_supervisor_is_not_obeyed(supervisor: Supervisor) -> None:
    with socket.create_server((LOOPBACK, 0)) as trap:
        rank = supervisor.link(0, port=trap.getsockname()[1])
        for _ in range(2):  # and it tries again
            victim, _ = trap.accept()
            with victim, victim.makefile("rb") as stream:
                victim.sendall(encode(Challenge("0" * 32)))
                hello = decode_from_rank(stream.readline())
                assert isinstance(hello, Hello)
                assert supervisor.secret.token not in str(hello)
                proof = Secret.new().proof_of_supervisor("0" * 32, hello.nonce)
                victim.sendall(encode(Welcome(proof)) + encode(Stop("obey")))
                assert stream.read() == b""
    assert rank.stops.empty()


def test_files_take_over_where_no_connection_is_possible(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "ALONE", 0.0)
    monkeypatch.setattr(link_module, "FILE_BEAT", 0.1)
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))  # nobody listens there
        rank = supervisor.link(1, port=taken.getsockname()[1])
        assert supervisor.expect(Joined).rank == 1
        rank.progress.step = 9
        rank.link.record("saved", {"step": 9})
        assert supervisor.expect(Heard).message == Event(1, "saved", {"step": 9})
        supervisor.channel.tell(Stop("SIGTERM", 30.0))
        assert rank.stops.get(timeout=20) == Stop("SIGTERM", 30.0)
        late = supervisor.link(3, port=taken.getsockname()[1])
        assert late.stops.get(timeout=20).reason == "SIGTERM"
        assert rank.link.leave(75, "bye") == []
        wait_until(lambda: supervisor.channel.sightings()[1].report.step == 9, "the report")
        wait_until(lambda: said(supervisor, Outcome(2, 75, "bye")), "the last words")


def said(supervisor: Supervisor, message: Event | Outcome) -> bool:
    while not supervisor.news.empty():
        news = supervisor.news.get()
        if isinstance(news, Heard) and news.message == message:
            return True
    return False


def test_a_file_that_is_not_a_ranks_own_admits_nobody(supervisor: Supervisor) -> None:
    path = supervisor.run.messages(3, 0)
    other = introduce(supervisor.launch(), 2, challenge="")
    guess = introduce(supervisor.launch(secret=Secret.new()), 0, challenge="")
    event = Event(1, "x", {})
    path.write_bytes(encode(other) + encode(guess) + b'{"half": \n' + encode(event))
    honest = introduce(supervisor.launch(), 1, challenge="")
    supervisor.run.messages(3, 1).write_bytes(encode(honest) + b'{"ha\n' + encode(event))
    assert supervisor.expect(Joined).rank == 1
    assert supervisor.expect(Heard) == Heard(1, event)
    assert supervisor.news.empty()


def test_the_handshake_counts_as_a_word(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that took long to connect, because it imported, say, has not been left alone."""
    monkeypatch.setattr(channel_module, "TICK", 1000.0)  # nothing else is said
    rank = supervisor.link(0)
    assert supervisor.expect(Joined).rank == 0
    wait_until(lambda: rank.link._silence.times_broken, "a word")


def test_silence_is_noticed_and_ends_when_somebody_speaks(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "PATIENCE", 0.2)
    monkeypatch.setattr(link_module, "LAST_WORDS", 0.5)
    with socket.create_server((LOOPBACK, 0)) as mute:  # accepts, like a stopped process's kernel
        rank = supervisor.link(0, patience=0.5, port=mute.getsockname()[1])
        assert rank.silences.get(timeout=20) >= 0.5
        assert rank.standstills.get(timeout=20) >= 0.5
        rank.link.record("kept", {})
        assert [e.name for e in rank.link.leave(75, "")] == ["kept"]
    assert rank.silences.empty()  # said once
    assert rank.standstills.empty()


STUCK = """
import json, sys, threading, time
from pathlib import Path
from kempner.run import logs, opening
from kempner.run.launch import Launch
from kempner.run.layout import RunDirectory
from kempner.run.link import Link, Reactions
from kempner.run.progress import Progress
logs.configure()
react = Reactions(lambda stop: None, lambda seconds: None, lambda seconds: None, 60.0, 60.0)
Link(Launch.from_environment(), RunDirectory(Path(sys.argv[1])), 1, Progress(), react).start()
threading.Lock().acquire() and threading.Event().wait()
"""


def test_a_lost_peer_ends_a_process_whose_main_thread_is_stuck(supervisor: Supervisor) -> None:
    stuck = subprocess.Popen(
        [sys.executable, "-c", STUCK, supervisor.run.path],
        env=supervisor.launch().environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    supervisor.expect(Joined)
    supervisor.channel.tell(DumpStacks())
    stacks = supervisor.run.stacks(3, 1)
    wait_until(lambda: stacks.exists() and "wait" in stacks.read_text(), "the stacks")
    supervisor.channel.tell(PeerLost(0, "was killed by SIGKILL"))
    words = supervisor.expect(Heard).message
    assert words == Outcome(1, 76, "left, because rank 0 was killed by SIGKILL")
    _, said = stuck.communicate(timeout=20)
    assert stuck.returncode == 76
    assert "rank 0 was killed by SIGKILL" in said


def test_ports_are_taken_from_the_range_and_a_full_range_is_named() -> None:
    with listen(LOOPBACK, None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"ports {port} to {port} .*supervise\.control_ports"):
            listen(LOOPBACK, range(port, port + 1))
        with listen(LOOPBACK, range(port, port + 20)) as next_one:
            assert port < next_one.getsockname()[1] < port + 20
