"""Slots in shared memory: what they hold is whole, or it is not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kempner.checkpoint.format.manifest import Identity, Rollback, TrainState
from kempner.checkpoint.slots.memory import (
    IMAGE_AT,
    SLOTS,
    STEP_SLOTS,
    Branch,
    CopyHolder,
    HeldSlot,
    Notes,
    SlotContents,
    SlotHolder,
    SlotMemory,
    open_slots,
)
from kempner.checkpoint.slots.pour import Offer, offers, pour
from kempner.checkpoint.slots.requests import Ask, SlotKeeper, offers_of, poured_by, reply_text

STATE = TrainState(7, 56, 1792, (3.5, 3.25), (Rollback(5, 2, 16, 40),))
IDENTITY = asdict(Identity(2, {"shard": 2}, 0, "data", {"dim": 8}))
IMAGE = bytes(range(256)) * 16
HELD = SlotContents(
    STATE, Branch("now"), 0, 2, plan=9, shared=4, image=len(IMAGE), identity=IDENTITY
)


def a_slot() -> SlotMemory:
    return SlotMemory.grown(os.memfd_create("test"), len(IMAGE))


def fill(holder: SlotHolder, rank: int, *steps: int, plan: int = 9, nonce: str = "now") -> None:
    """A rank of two that has kept these steps, one in each slot."""
    environ: dict[str, str] = {}
    holder.lend(rank, environ)
    lent = open_slots(environ)
    assert lent is not None
    for descriptor, step in zip(lent.slots, steps, strict=False):
        memory = SlotMemory.grown(descriptor, len(IMAGE))
        memory.image[:] = IMAGE
        state = replace(STATE, step=step)
        identity = IDENTITY if rank == 0 else {}
        memory.publish(SlotContents(state, Branch(nonce), rank, 2, plan, 4, len(IMAGE), identity))
    if rank == 0:
        Notes(9, {"index": b"what is where"}).write(lent.notes)


def asking(holder: SlotHolder) -> Ask:
    """As if each node were one that keeps these."""
    keeper = SlotKeeper(holder, CopyHolder(), lambda interface: ("", 0))
    return lambda texts: {node: reply_text(keeper, text) for node, text in texts.items()}


def test_what_was_published_is_held_until_it_is_withdrawn() -> None:
    slot = a_slot()
    assert slot.held() is None
    assert slot.publish(HELD)
    assert slot.held() == HELD
    slot.withdraw()
    assert slot.held() is None


@pytest.mark.parametrize("at", [0, 9, 13, 60])
def test_a_torn_header_holds_nothing(at: int) -> None:
    slot = a_slot()
    slot.publish(HELD)
    slot._map[at] ^= 1
    assert slot.held() is None


def test_more_than_fits_into_the_header_is_not_published() -> None:
    slot = a_slot()
    assert not slot.publish(replace(HELD, identity={"model": "x" * IMAGE_AT}))
    assert slot.held() is None


def test_an_image_that_is_longer_than_the_slot_is_not_there() -> None:
    slot = a_slot()
    slot.publish(replace(HELD, image=len(IMAGE) + 1))
    assert slot.held() is None


def test_a_rank_opens_its_own_slots_by_way_of_who_keeps_them() -> None:
    holder, environ = SlotHolder(), dict[str, str]()
    holder.lend(3, environ)
    assert environ[STEP_SLOTS].startswith(f"{os.getpid()}:")
    opened = open_slots(environ)
    assert opened is not None
    assert (len(opened.slots), opened.board, opened.images) == (SLOTS, None, SLOTS)
    os.ftruncate(opened.slots[0], 5)
    holder.lend(3, environ)  # the same ones, in the next attempt
    again = open_slots(environ)
    assert again is not None
    assert os.fstat(again.slots[0]).st_size == 5
    holder.keep_only([])
    assert open_slots(environ) is None
    assert open_slots({}) is None


def test_notes_are_read_as_they_were_written_or_not_at_all() -> None:
    descriptor = os.memfd_create("notes")
    assert Notes.read(descriptor) is None
    notes = Notes(9, {"index": b"\n\x00what", "empty": b""})
    notes.write(descriptor)
    assert Notes.read(descriptor) == notes
    os.pwrite(descriptor, b"\0", 0)
    assert Notes.read(descriptor) is None


def test_only_the_attempt_that_has_died_is_offered() -> None:
    holder = SlotHolder()
    fill(holder, 0, 6, 7)
    fill(holder, 1, 7, nonce="before")
    assert offers(holder, "now") == [Offer(0, 2, 6, 9, 4), Offer(0, 2, 7, 9, 4)]
    assert offers(holder, "other") == []


def test_rank_0_offers_nothing_without_the_notes_of_its_plan() -> None:
    holder = SlotHolder()
    fill(holder, 0, 7, plan=8)
    assert offers(holder, "now") == []


def test_what_is_poured_is_what_was_held(tmp_path: Path) -> None:
    """Also where the request and the reply travel to another node."""
    holder = SlotHolder()
    fill(holder, 0, 6, 7)
    fill(holder, 1, 7, 6)
    ask = asking(holder)
    offered = offers_of(ask, ["node"], "now")
    assert offered == {"node": tuple(offers(holder, "now"))}
    folder = tmp_path / ".step-00000007.a1-00000001"
    first, second = poured_by(ask, offered, "now", 7, folder)
    assert (first.train_state, first.identity) == (replace(STATE, step=7), IDENTITY)
    assert (second.train_state, second.identity) == (None, {})
    assert (folder / "__1_0.distcp").read_bytes() == IMAGE
    assert (folder / "index").read_bytes() == b"what is where"
    listed = {name: entry.bytes for name, entry in (first.files | second.files).items()}
    assert listed == {path.name: path.stat().st_size for path in folder.iterdir()}


def test_what_cannot_be_written_is_told_with_its_error_number(tmp_path: Path) -> None:
    holder = SlotHolder()
    fill(holder, 1, 7)
    (tmp_path / "file").write_text("in the way")
    offered = {"node": offers(holder, "now")}
    with pytest.raises(NotADirectoryError):
        poured_by(asking(holder), offered, "now", 7, tmp_path / "file" / "x")
    with pytest.raises(NotADirectoryError):
        pour(holder, "now", 7, tmp_path / "file" / "x")


def test_slots_tell_what_memory_they_take_and_give_it_back() -> None:
    lent = SlotHolder().lend(0, {})
    assert lent.taken == 0
    for slot in lent.slots[:2]:
        SlotMemory.grown(slot, 1 << 20).image[:] = bytes(1 << 20)
    assert lent.taken >= 2 << 20
    lent.empty()
    assert lent.taken == 0


def test_a_slot_that_is_emptied_while_it_is_written_fails_the_pour_and_kills_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A salvage that storage holds up goes on reading when the next attempt begins anew."""
    holder = SlotHolder()
    fill(holder, 0, 7)
    [slot] = holder.slots()[0]
    offered = offers(holder, "now")
    assert [offer.step for offer in offered] == [7]
    descriptor = holder._lent[0].slots[0]
    read = HeldSlot.read

    def emptied(self: HeldSlot, into: memoryview, at: int) -> None:
        SlotMemory.grown(descriptor, 16)
        read(self, into, at)

    monkeypatch.setattr(HeldSlot, "read", emptied)
    with pytest.raises(OSError, match="given up while it was read"):
        pour(holder, "now", 7, tmp_path / "x")
    assert slot.held() is None


def test_without_a_file_to_open_no_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made, create = [], os.memfd_create

    def refuse(name: str) -> int:
        if len(made) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(create(name))
        return made[-1]

    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert SlotHolder().lend(0, environ) is None
    assert environ == {}
    for descriptor in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def copies_of(holder: SlotHolder) -> CopyHolder:
    """What a buddy has of it."""
    copies, notes = CopyHolder(), holder.notes()
    for slots in holder.slots().values():
        for slot in slots:
            held = slot.held()
            assert held is not None
            memory = copies.take(held)
            slot.read(memory.image, 0)
            copies.publish(memory, held, notes)
    return copies


@pytest.mark.parametrize("rank", [0, 1])
def test_where_a_node_cannot_write_its_buddy_does(tmp_path: Path, rank: int) -> None:
    """Its storage is away, say; what it has begun is not in its buddy's way."""
    nodes = SlotHolder(), SlotHolder()
    for number, holder in enumerate(nodes):
        fill(holder, number, 6, 7)
    listen = lambda interface: ("", 0)  # noqa: E731
    keepers = {f"node{n}": SlotKeeper(nodes[n], copies_of(nodes[1 - n]), listen) for n in range(2)}
    folder, asked = tmp_path / ".step-00000007.a1-00000001", list[str]()

    def ask(texts: Mapping[str, str]) -> dict[str, str]:
        asked.extend(texts)
        replies = {node: reply_text(keepers[node], text) for node, text in texts.items()}
        if folder.exists() and f"node{rank}" in replies:
            (folder / f"__{rank}_0.distcp").write_bytes(b"half")
            replies[f"node{rank}"] = '{"error": 116, "why": "Stale file handle"}'
        return replies

    offered = offers_of(ask, keepers, "now")
    poured = poured_by(ask, offered, "now", 7, folder)
    assert sorted(each.rank for each in poured) == [0, 1]
    assert asked.count("node0") + asked.count("node1") == 2 + 2 + 1
    entries = {name: entry.bytes for each in poured for name, entry in each.files.items()}
    assert entries == {path.name: path.stat().st_size for path in folder.iterdir()}
    assert (folder / f"__{rank}_0.distcp").read_bytes() == IMAGE
    del keepers[f"node{1 - rank}"]
    with pytest.raises(OSError, match="Stale file handle"):
        poured_by(ask, {f"node{rank}": offered[f"node{rank}"]}, "now", 7, folder)
