"""Copies of steps travel from node to node: what arrives is what was sent, or it is not there."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from harness import wait_until

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.slots.memory import (
    IMAGE_AT,
    PINNED,
    SLOTS,
    Board,
    Branch,
    CopyHolder,
    HeldSlot,
    LentSlots,
    Notes,
    SlotContents,
    SlotHolder,
    SlotMemory,
)
from kempner.checkpoint.slots.pour import offers
from kempner.run.link.auth import Door, Secret, copies_of
from kempner.run.link.messages import Caller, Role
from kempner.supervisor.launchers.agents.buddy import copies as buddy_module
from kempner.supervisor.launchers.agents.buddy.copies import CopyReceiver, CopySender
from kempner.supervisor.launchers.agents.fleet import buddies
from kempner.supervisor.launchers.agents.messages import Buddy

SECRET = Secret.new()
IMAGE = os.urandom(24 << 20)  # more than two sockets hold
NOTES = Notes(9, {"index": b"what is where"})


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddy_module, "AGAIN", 0.02)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


class Node:
    """A node with one rank, which is rank 0, and its agent's sender."""

    def __init__(self) -> None:
        self.lent = SlotHolder().lend(0, {}, with_buddy=True)
        assert self.lent.board is not None
        self.board = Board(self.lent.board)
        NOTES.write(self.lent.notes)
        self.sender = CopySender(SECRET)

    def keep(self, number: int, step: int, since: int = 0) -> SlotMemory:
        """Have a slot hold a step."""
        slot = SlotMemory.grown(self.lent.slots[number], len(IMAGE))
        slot.image[:] = image_of(step)
        slot.publish(held_at(step, since))
        return slot

    def pin(self, number: int) -> None:
        """As soon as it may."""
        wait_until(lambda: self.board.may_pin, "leave to pin", 20, interval=0.005)
        self.board.pin(number)

    def sent(self) -> None:
        """Wait until what was pinned has arrived."""
        wait_until(lambda: self.board.may_pin, "the arrival", 20, interval=0.005)


def image_of(step: int) -> bytes:
    return bytes([step]) + IMAGE[1:]


def held_at(step: int, since: int = 0) -> SlotContents:
    branch = Branch("now", since)
    return SlotContents(TrainState(step), branch, 0, 2, 9, 4, len(IMAGE), {"world": 2})


@pytest.fixture
def copies() -> CopyHolder:
    return CopyHolder()


@pytest.fixture
def port(copies: CopyHolder) -> int:
    address, port = CopyReceiver(copies, SECRET, ("127.0.0.1",), "node1").listen("")
    assert address == "127.0.0.1"
    return port


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.sender.end()


def begin(node: Node, port: int, ranks: dict[int, LentSlots] | None = None) -> None:
    node.sender.begin(Buddy("node1", "127.0.0.1", port, 1.0), ranks or {0: node.lent})


def steps(copies: CopyHolder) -> list[int]:
    return sorted(offer.step for offer in offers(copies, "now", copied=True))


def test_what_is_pinned_arrives_whole_and_the_one_before_it_stays(
    node: Node, copies: CopyHolder, port: int
) -> None:
    assert not node.board.may_pin  # no sender has begun yet
    begin(node, port)
    for step in (7, 8, 9):
        node.keep(step % 5, step)
        node.pin(step % 5)
        node.sent()
    assert steps(copies) == [8, 9]
    assert copies.notes() == NOTES
    arrived = {state_of(slot).step: content(slot) for slot in copies.slots()[0]}
    assert arrived == {8: image_of(8), 9: image_of(9)}


def content(slot: HeldSlot) -> bytes:
    image = bytearray(len(IMAGE))
    slot.read(memoryview(image), 0)
    return bytes(image)


def state_of(slot: HeldSlot) -> TrainState:
    held = slot.held()
    assert held is not None
    return held.train_state


class Line:
    """A line between two nodes that breaks or falsifies what passes."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._to = port
        self.passed = 0
        self.spoil: Callable[[bytes], bytes | None] = lambda part: part
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            near, _ = self.listener.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, there: bool) -> None:
        try:
            while part := source.recv(1 << 16):
                spoiled = self.spoil(part) if there else part
                if spoiled is None:
                    break
                self.passed += len(part) if there else 0
                to.sendall(spoiled)
        except OSError:
            pass
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("how", ["cut", "falsified"])
def test_a_copy_that_does_not_arrive_as_it_was_is_sent_again(
    node: Node, copies: CopyHolder, port: int, how: str
) -> None:
    """Meanwhile the one before it is there."""
    line = Line(port)
    begin(node, line.port)
    node.keep(0, 7)
    node.pin(0)
    node.sent()
    seen: list[list[int]] = []

    def spoil(part: bytes) -> bytes | None:
        if line.passed < len(IMAGE) + IMAGE_AT + (3 << 20) or len(seen) >= 2:
            return part
        seen.append(steps(copies))
        return None if how == "cut" else bytes([part[0] ^ 1]) + part[1:]

    line.spoil = spoil
    node.keep(1, 8)
    node.pin(1)
    node.sent()
    assert seen == [[7], [7]]
    assert steps(copies) == [7, 8]
    arrived = {state_of(slot).step: content(slot) for slot in copies.slots()[0]}
    assert arrived == {7: image_of(7), 8: image_of(8)}


def test_what_the_run_went_back_behind_is_given_up_on_its_way(
    node: Node, copies: CopyHolder, port: int
) -> None:
    line, slot = Line(port), node.keep(0, 7)

    def spoil(part: bytes) -> bytes:
        if line.passed > 1 << 20:
            node.board.go_back()
            slot.withdraw()
        return part

    line.spoil = spoil
    begin(node, line.port)
    node.pin(0)
    node.sent()
    assert node.board.since > 0
    assert steps(copies) == []
    line.spoil = lambda part: part
    os.ftruncate(node.lent.slots[0], 0)  # as where the state has got another shape
    node.board.pin(0)
    node.sent()
    node.keep(1, 5, since=1)
    node.pin(1)
    node.sent()
    assert steps(copies) == [5]


def test_a_rank_whose_buddy_cannot_be_reached_pins_no_more_and_goes_on(
    node: Node, copies: CopyHolder, port: int
) -> None:
    with closed_port() as closed:
        begin(node, closed)
        node.keep(0, 7)
        node.pin(0)
    assert not node.board.may_pin
    begin(node, port)  # the next attempt has another one
    node.sent()
    assert steps(copies) == [7]


def test_what_an_attempt_that_is_over_has_pinned_is_sent_no_more(node: Node, port: int) -> None:
    def sends() -> int:
        return [thread.name for thread in threading.enumerate()].count("copies of rank 0")

    wait_until(lambda: sends() == 0, "other tests' senders are gone", 20)
    for _ in range(3):
        begin(node, port)
    wait_until(lambda: sends() == 1, "the last alone sends", 20)
    node.sender.end()
    wait_until(lambda: sends() == 0, "nothing is sent", 20)


@contextmanager
def closed_port() -> Iterator[int]:
    """A port without a listener."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_who_does_not_know_the_secret_brings_nothing(copies: CopyHolder, port: int) -> None:
    caller = Caller(Role.SENDER, 0, 0, "node2", 1)
    for stranger in (Door(Secret.new(), copies_of("node1")), Door(SECRET, copies_of("node3"))):
        with pytest.raises(OSError, match="closed by the other side"):
            stranger.open(socket.create_connection(("127.0.0.1", port)), caller)
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.sendall(b"\0" * 4096)
        while wire.recv(4096):  # a challenge, then the end
            pass
    assert copies.slots() == {}


def test_the_same_step_again_takes_its_own_place() -> None:
    """After an answer that was lost: the one before it must not go."""
    copies = CopyHolder()
    for step in (7, 8, 8):
        copies.publish(copies.take(held_at(step)), held_at(step), NOTES)
    assert steps(copies) == [7, 8]
    copies.publish(copies.take(held_at(3, since=1)), held_at(3, since=1), None)
    assert steps(copies) == [3, 8]
    following = replace(held_at(1), branch=Branch("next"))
    copies.publish(copies.take(following), following, None)
    assert len(steps(copies)) == 1
    copies.clear()
    assert (copies.slots(), copies.notes()) == ({}, None)


def test_a_rank_with_a_buddy_has_slots_for_what_is_sent() -> None:
    holder = SlotHolder()
    lent = holder.lend(0, {}, with_buddy=True)
    assert (len(lent.slots), lent.images) == (SLOTS + PINNED, SLOTS + PINNED + 2)
    assert holder.boards() == [lent.board]
    assert holder.lend(0, {}).images == SLOTS
    assert holder.boards() == []


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_each_node_has_one_buddy_and_nobody_is_its_own(size: int) -> None:
    nodes = [f"node{n}" for n in range(size)]
    pairs = buddies(nodes)
    assert sorted(pairs) == sorted(pairs.values()) == nodes
    assert all(node != buddy for node, buddy in pairs.items())
