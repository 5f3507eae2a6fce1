"""The control channel among impostors, garbage, floods and those who say nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
from callers import LOOPBACK, SIZE, Stranger, Supervisor, dial, door_of, introduce, open_wire
from harness import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import scaled
from spoken import SIDES, Side, said_by

from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import (
    Connected,
    Disconnected,
    Event,
    Phase,
    RankMessage,
    Report,
    Stop,
)
from kempner.run.link import server as channel_module
from kempner.run.link.auth import AGENTS, Door, Secret, decode_hello, ranks_at
from kempner.run.link.messages import LINE_LIMIT, PROTOCOL, Caller, Challenge, Role, Welcome, encode
from kempner.run.link.wire import Connection, listen, listen_here
from kempner.run.process.exit_codes import StopReason
from kempner.run.record.attempts import Attempt
from kempner.run.record.events import Signalled
from kempner.supervisor.launchers.agents.fleet import (
    AgentConnected,
    AgentDisconnected,
    AgentNews,
    AgentServer,
)
from kempner.supervisor.launchers.agents.messages import ToAgent


def impostors(s: Supervisor) -> dict[str, tuple[Launch, int]]:
    """Launches and ranks that are none of this supervisor's."""
    other = replace(s.launch(), attempt=Attempt(2, "abcd"))
    return {
        "it does not know the token": (s.launch(secret=Secret.new()), 0),
        "it belongs to attempt 2": (other, 0),
        "it claims to be rank 4 of 4": (s.launch(), SIZE),
    }


def test_impostors_are_refused_with_a_reason(supervisor: Supervisor) -> None:
    for launch, rank in impostors(supervisor).values():
        with pytest.raises(OSError, match="closed by the other side"):
            open_wire(launch, rank)
    stranger = Stranger(supervisor.socket)
    hello = introduce(supervisor.launch(), 0, stranger.challenge())
    stranger.say(replace(hello, version=PROTOCOL + 1))
    assert stranger.is_hung_up_on()
    wait_until(lambda: len(supervisor.refusals()) == 4, "the reasons")
    reasons = [
        *impostors(supervisor),
        f"it speaks version {PROTOCOL + 1} of the protocol, this is {PROTOCOL}",
    ]
    assert supervisor.refusals() == reasons
    assert supervisor.news.empty()


def test_a_proof_cannot_be_used_again(supervisor: Supervisor) -> None:
    first, second = Stranger(supervisor.socket), Stranger(supervisor.socket)
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
    stranger = Stranger(supervisor.socket)
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
    supervisor.expect(Connected)
    stranger = Stranger(supervisor.socket)
    stranger.say(introduce(supervisor.launch(), 0, stranger.challenge()))
    supervisor.expect(Connected)
    assert isinstance(stranger.hear(), Welcome)
    stranger.say(content)
    assert supervisor.expect(Disconnected).rank == 0
    other.link.record(Signalled())
    assert supervisor.expect(RankMessage).rank == 1


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path_factory.mktemp("lasting"))
    yield supervisor
    supervisor.close()


@dataclass
class Port:
    """A port of the supervisor, how a caller gets in there, and all that it takes in."""

    door: Door
    place: int | str
    caller: Caller
    side: Side
    heard: list[object]

    def open(self) -> Connection:
        return self.door.open(dial(self.place), self.caller)


@pytest.fixture(scope="module")
def ports(lasting: Supervisor) -> Iterator[dict[str, Port]]:
    """That of ranks and that of agents."""
    ranks, agents, sides = list[object](), list[object](), {side.name: side for side in SIDES}
    hub = lasting.agent.ranks
    hub.hear = lambda rank, message: ranks.append(message)  # type: ignore[method-assign]

    def hear(node: str, news: AgentNews) -> list[ToAgent]:
        agents.extend([] if isinstance(news, AgentConnected | AgentDisconnected) else [news])
        return []

    server = AgentServer(listen([LOOPBACK], None), lasting.secret, 1, hear, lambda told: "")
    rank, agent = Caller(Role.RANK, 3, 0, "n", 1), Caller(Role.AGENT, 0, 0, "n", 1)
    yield {
        "ranks": Port(door_of(lasting.launch()), lasting.socket, rank, sides["rank"], ranks),
        "agents": Port(Door(lasting.secret, AGENTS), server.port, agent, sides["agent"], agents),
    }
    server.close()


ANY_LINE = st.sampled_from(SIDES).flatmap(said_by).map(encode)
CHUNKS = st.lists(st.binary(max_size=200) | st.just(b"\n") | ANY_LINE, max_size=5)


@pytest.mark.parametrize("authenticated", [False, True])
@pytest.mark.parametrize("port", ["ranks", "agents"])
@given(CHUNKS, st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_bytes_and_no_message_of_any_role_disturb_it(
    ports: dict[str, Port], port: str, authenticated: bool, chunks: list[bytes], abruptly: bool
) -> None:
    at = ports[port]
    at.heard.clear()
    stranger = at.open().release() if authenticated else dial(at.place)
    if abruptly:  # a reset instead of an orderly end
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with stranger, suppress(OSError):
        for chunk in chunks:
            stranger.sendall(chunk)
    at.open().close()  # an honest caller gets in
    assert authenticated or at.heard == []
    for message in at.heard:  # and nothing was taken in that this caller may not say
        assert at.side.decode(encode(message)) == message


def test_half_open_connections_do_not_keep_ranks_out(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "PENDING_LIMIT", 4)
    idle = [Stranger(supervisor.socket) for _ in range(3 * SIZE)]
    rank = supervisor.link(0)
    assert supervisor.expect(Connected).rank == 0
    assert idle[0].hear()
    assert idle[0].is_hung_up_on()
    rank.link.record(Signalled())
    supervisor.expect(RankMessage)


def test_who_never_says_who_it_is_has_to_go(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "OPENING_TIME", 0.0)
    stranger = Stranger(supervisor.socket)
    stranger.challenge()
    assert stranger.is_hung_up_on()
    wait_until(supervisor.refusals, "the reason")
    assert supervisor.refusals() == ["it did not authenticate in time"]


def test_a_rank_that_does_not_read_is_given_up_and_the_others_hear_all(
    supervisor: Supervisor,
) -> None:
    deaf = Stranger(supervisor.socket)
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.say(introduce(supervisor.launch(), 0, deaf.challenge()))
    supervisor.expect(Connected)
    rank = supervisor.link(1)
    supervisor.expect(Connected)
    long = "x" * 4000
    told = 0
    while supervisor.news.empty():
        for _ in range(100):
            supervisor.channel.tell(Stop(StopReason.SIGNAL, long, float(told)), rank=0)
        supervisor.channel.tell(Stop(StopReason.SIGNAL, "next", float(told)), rank=1)
        assert rank.stops.get(timeout=scaled(20)).seconds_left == float(told)
        told += 1
        assert told < 1000
    assert supervisor.expect(Disconnected) == Disconnected(0, "it does not read its messages")


def test_a_false_supervisor_is_not_obeyed(supervisor: Supervisor) -> None:
    with listen_here("trap") as trap:
        rank = supervisor.link(0, socket="trap")
        for _ in range(2):  # and it tries again
            victim, _ = trap.accept()
            with victim, victim.makefile("rb") as stream:
                victim.sendall(encode(Challenge("0" * 32)))
                hello = decode_hello(stream.readline())
                assert supervisor.secret.token not in str(hello)
                welcome = Door(Secret.new(), ranks_at("trap")).welcome(hello, "0" * 32)
                victim.sendall(encode(welcome) + encode(Stop(StopReason.SIGNAL, "obey")))
                assert stream.read() == b""
    assert rank.stops.empty()
