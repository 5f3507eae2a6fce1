"""The control protocol: what is said comes through, and nothing else does."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from harness import Clock
from hypothesis import given
from hypothesis import strategies as st
from spoken import SIDES, Side, said_by, values

from kempner.run.control import heartbeat
from kempner.run.control.heartbeat import Progress, StepDelays
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import (
    Event,
    Outcome,
    Phase,
    Report,
    Stop,
    decode_from_rank,
    decode_from_supervisor,
)
from kempner.run.link.auth import AGENTS, Door, Secret, copies_of, new_nonce, ranks_at
from kempner.run.link.client import Outbox, SilenceClock
from kempner.run.link.messages import (
    LINE_LIMIT,
    WORDS_LIMIT,
    Caller,
    MessageError,
    Role,
    encode,
    shorten,
)
from kempner.run.link.wire import Lines
from kempner.run.process import threads as awake
from kempner.run.process.exit_codes import StopReason
from kempner.run.process.threads import LONGEST_NAP
from kempner.run.record.attempts import Attempt
from kempner.supervisor.launchers.agents.messages import (
    SealedLaunch,
    StartRanks,
    decode_to_agent,
)


@given(st.sampled_from(SIDES), st.data())
def test_what_any_side_says_comes_through(side: Side, data: st.DataObject) -> None:
    message = data.draw(said_by(side))
    line = encode(message)
    assert line.count(b"\n") == 1
    assert side.decode(line[:-1]) == message


@given(st.binary(max_size=300) | values.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused_without_being_repeated(line: bytes) -> None:
    for side in SIDES:
        with pytest.raises(MessageError) as refused:
            side.decode(line)
        assert len(str(refused.value)) < 100


@given(st.sampled_from(SIDES), st.data())
def test_one_odd_field_is_enough(side: Side, data: st.DataObject) -> None:
    fields = json.loads(encode(data.draw(said_by(side))))
    required = [name for name in fields if name in ("number", "nonce", "proof", "attempt", "step")]
    name = data.draw(st.sampled_from(sorted(fields)))
    odd = data.draw(
        st.sampled_from(
            [
                {**fields, "extra": 1},
                {k: v for k, v in fields.items() if k not in required[:1]},
                {**fields, name: {"no": {"such": "type"}}},
                {**fields, name: -1},
            ]
        )
    )
    if odd == fields or name == "fields":  # any object is a ledger event's
        return
    if odd.get("status") == -1:  # ended by SIGHUP
        return
    with pytest.raises(MessageError):
        side.decode(json.dumps(odd).encode())


def test_an_agent_takes_no_environment() -> None:
    """What ranks are told is made of named fields alone: nothing can be preloaded."""
    launch = Launch(Attempt(1, "ab"), Secret.new())
    order = StartRanks(1, SealedLaunch.of(launch, Secret.new()), 0, 1, 1, ("node1", 1))
    fields = json.loads(encode(order))
    assert decode_to_agent(json.dumps(fields).encode()) == order
    for part in (fields, fields["launch"]):
        for name in ("variables", "environ", "LD_PRELOAD"):
            part[name] = {"LD_PRELOAD": "x.so"}
            with pytest.raises(MessageError):
                decode_to_agent(json.dumps(fields).encode())
            del part[name]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind":"progress","step":"1","phase":"step","worked":1,"waited":1}',
        '{"kind":"progress","step":1.0,"phase":"step","worked":1,"waited":1}',
        '{"kind":"progress","step":true,"phase":"step","worked":1,"waited":1}',
        '{"kind":"progress","step":1,"phase":"sleep","worked":1,"waited":1}',
        '{"kind":"progress","step":1,"phase":"step","worked":NaN,"waited":1}',
        '{"kind":"progress","step":1,"phase":"step","worked":1,"waited":Infinity}',
        '{"kind":"progress","step":36893488147419103232,"phase":"step","worked":1,"waited":1}',
        '{"kind":"outcome","number":1,"code":256,"sentence":""}',
        '{"kind":"outcome","number":1,"code":1,"sentence":"' + "x" * (WORDS_LIMIT + 1) + '"}',
        '{"kind":"event","number":1,"name":"x","fields":' + '{"a":' * 500 + "1" + "}" * 500 + "}",
        '{"kind":"stop","reason":"a rank gives no orders"}',
    ],
)
def test_neighbouring_types_and_values_out_of_bounds_are_refused(line: str) -> None:
    with pytest.raises(MessageError):
        decode_from_rank(line.encode())


def test_the_reason_of_a_stop_travels_by_its_name() -> None:
    assert b'"reason":"TIME_LIMIT"' in encode(Stop(StopReason.TIME_LIMIT))
    for odd in ("NONE", "time_limit", "BOREDOM", 7, None, ["CANCEL"], {"name": "CANCEL"}):
        with pytest.raises(MessageError):
            decode_from_supervisor(json.dumps({"kind": "stop", "reason": odd}).encode())


def test_half_a_surrogate_pair_does_not_cost_the_message() -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    message = decode_from_rank(encode(Event(1, "saved", {"path": name})))
    assert isinstance(message, Event)
    assert message.fields == {"path": "caf?"}


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b)), st.data())
def test_lines_do_not_depend_on_how_they_arrive(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    cutter = Lines()
    got: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += cutter.feed(stream[start:end])
    assert got == lines


def test_a_line_may_not_grow_without_end() -> None:
    with pytest.raises(MessageError, match="exceeds"):
        Lines().feed(b"x" * LINE_LIMIT + b"\n")
    cutter = Lines()
    for _ in range(LINE_LIMIT // 1024 - 1):
        assert cutter.feed(b"x" * 1024) == []
    with pytest.raises(MessageError, match="exceeds"):
        cutter.feed(b"x" * 1024)
    with pytest.raises(MessageError, match="exceeds"):
        encode(Event(1, "x", {"y": "z" * LINE_LIMIT}))
    assert len(shorten("x" * LINE_LIMIT)) == WORDS_LIMIT


def test_a_proof_holds_for_one_token_one_challenge_one_caller_and_one_endpoint() -> None:
    secret, challenge = Secret.new(), new_nonce()
    ranks = ranks_at("one")
    door, caller = Door(secret, ranks), Caller(Role.RANK, 1, 2, "node1", 7)
    hello = door.introduce(caller, challenge)
    assert not door.refusal(hello, challenge)
    others = (ranks_at("other"), AGENTS, copies_of("node1"), replace(ranks, owner=Role.KEEPER))
    for other in (Door(Secret.new(), ranks), *(Door(secret, where) for where in others)):
        assert other.refusal(hello, challenge)
        assert other.welcome(hello, challenge) != door.welcome(hello, challenge)
    assert door.refusal(hello, new_nonce())
    changed = {"role": Role.AGENT, "group": 2, "member": 3, "host": "node2", "pid": 8}
    for name, value in changed.items():
        another = replace(caller, **{name: value})  # type: ignore[arg-type]
        assert door.refusal(replace(hello, caller=another), challenge)
    for odd in (replace(hello, nonce=new_nonce()), replace(hello, proof="0" * 64)):
        assert door.refusal(odd, challenge)
    assert door.refusal(replace(hello, proof=door.welcome(hello, challenge).proof), challenge)
    sender = replace(caller, role=Role.SENDER)
    assert (
        door.refusal(door.introduce(sender, challenge), challenge) == "it calls as sender of copies"
    )
    assert secret.token not in repr(secret)


def test_an_outbox_keeps_what_was_not_heard() -> None:
    outbox = Outbox(decode_from_rank)
    for name in ("a", "b", "c"):
        outbox.add(lambda number, name=name: Event(number, name, {}))  # type: ignore[misc]
    outbox.add(lambda number: Event(number, "too long", {"x": "y" * LINE_LIMIT}))
    outbox.add(lambda number: Event(number, "n" * 256, {}))
    outbox.add(lambda number: Outcome(number, 0, ""))
    assert [m.number for m in outbox.after(0)] == [1, 2, 3, 4]
    outbox.heard(2)
    assert [m.number for m in outbox.after(0)] == [3, 4]
    assert [m.number for m in outbox.after(3)] == [4]
    outbox.heard(1)  # late, and known
    assert [m.number for m in outbox.wait_until_heard(0)] == [3, 4]
    outbox.heard(4)
    assert outbox.wait_until_heard(0) == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(awake, "time", clock)
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def test_silence_is_told_once_and_a_suspended_process_did_not_listen(clock: Clock) -> None:
    quiet = SilenceClock(60)
    clock.now += 3600  # suspended
    assert not quiet.exceeds_limit()
    assert quiet.seconds == LONGEST_NAP
    told = []
    for _ in range(100):
        clock.now += 1
        told.append(quiet.exceeds_limit())
    assert told.index(True) == math.ceil(60 - LONGEST_NAP) - 1
    assert told.count(True) == 1
    quiet.heard()
    assert not quiet.exceeds_limit()


def test_progress_tells_work_from_waiting_and_phases_end(clock: Clock) -> None:
    place = Progress()
    assert place.report() == Report(0, Phase.START, 0.0, 0.0)
    place.enter(Phase.COMPILE)
    clock.now += 2
    with place.waiting("the vote"):
        clock.now += 3
        assert place.report() == Report(0, Phase.COMPILE, 0.0, 0.0, "the vote")
    place.made(7)
    assert place.report() == Report(7, Phase.STEP, 2.0, 3.0)
    with place.during(Phase.EVAL):
        clock.now += 1
        assert place.report() == Report(7, Phase.EVAL, 2.0, 3.0)  # the time of a step, at its end
        with place.waiting("a sum"):
            clock.now += 1
    clock.now += 4
    place.made(8)
    assert place.report() == Report(8, Phase.STEP, 6.0, 3.0)  # an evaluation is no part of a step
    assert place.reached == {Phase.COMPILE: 0.0, Phase.STEP: 5.0}


def test_progress_tells_what_held_up_the_steps(clock: Clock) -> None:
    place = Progress()
    with place.during(Phase.EVAL), place.waiting("a sum"):
        clock.now += 9
    with place.held_up_by("data"):
        clock.now += 4
    with place.waiting("the vote"):
        clock.now += 5
    with place.during(Phase.SAVE):
        clock.now += 2
    with place.held_up_by("saves"):
        clock.now += 1
    assert place.take_held_up() == StepDelays(saves=3, data=4, ranks=5)
    with place.waiting("the vote"):
        clock.now += 1
    assert place.take_held_up() == StepDelays(ranks=1)
