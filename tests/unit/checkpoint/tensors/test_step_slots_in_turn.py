"""The turns of the slots: what every rank may have to fall back to is never overwritten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format import shard_plan
from kempner.checkpoint.format.manifest import Identity, TrainState
from kempner.checkpoint.slots.memory import SlotHolder, open_slots
from kempner.checkpoint.tensors import step_slots
from kempner.checkpoint.tensors.file_buffer import container, tensor_specs
from kempner.checkpoint.tensors.step_slots import Slot, StepMemory, StepSlots
from kempner.run.record.attempts import Attempt, Fence

PLACED = shard_plan.place(tensor_specs({"weight": torch.zeros(1000)}, 1), 0, container)


@pytest.fixture
def slots(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StepSlots]:
    """Of a world of one, which has a buddy if the test asks for one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    fence = Fence(tmp_path, Attempt(1, "now"))
    group = dist.group.WORLD
    assert group is not None
    context = CheckpointContext(tmp_path, Identity(1, {}, 0, None, {}), fence, group)
    holder, environ = SlotHolder(), dict[str, str]()
    holder.lend(0, environ, with_buddy=getattr(request, "param", False))
    yield StepSlots(context, StepMemory(open_slots(environ), group))
    holder.keep_only([])
    dist.destroy_process_group()


def keep(slots: StepSlots, step: int, sound: bool = True) -> Slot:
    slot, slots.newest = slots.take(), step
    slots.publish(slot, 9, 0, lambda: TrainState(step) if sound else None)
    return slot


def agree(slots: StepSlots) -> None:
    slots.ask()
    slots.hear()


def held(slots: StepSlots) -> set[int | None]:
    return {slot.step for slot in slots.slots if slot.memory.held() is not None}


def test_the_step_that_all_hold_stays_until_there_is_a_newer_one(slots: StepSlots) -> None:
    assert slots.lay_out(PLACED)
    for step in range(1, 10):
        slot = slots.take()
        assert step - 1 in held(slots) | {0}  # while step is being copied
        slots.newest = step
        slots.publish(slot, 9, 0, lambda step=step: TrainState(step))
        agree(slots)


def test_what_is_being_written_to_disk_stays(slots: StepSlots) -> None:
    slots.lay_out(PLACED)
    written = keep(slots, 1)
    written.busy = True
    agree(slots)
    for step in range(2, 8):
        keep(slots, step)
        agree(slots)
        assert {1, step} <= held(slots)
    written.busy = False
    keep(slots, 8)
    assert 1 not in held(slots)


def test_what_is_not_sound_is_not_held_and_costs_no_sound_one(slots: StepSlots) -> None:
    slots.lay_out(PLACED)
    keep(slots, 1)
    agree(slots)
    for step in range(2, 6):
        keep(slots, step, sound=False)
        agree(slots)
        assert held(slots) == {1}


def test_a_rank_that_is_ahead_does_not_take_what_the_others_have(slots: StepSlots) -> None:
    """One whose copies fail holds step 1 only: no rank overwrites that."""
    slots.lay_out(PLACED)
    keep(slots, 1)
    agree(slots)
    for step in range(2, 6):
        keep(slots, step)
        assert 1 in held(slots)


@pytest.mark.parametrize("slots", [True], indirect=True)
def test_a_buddy_gets_the_newest_step_and_the_one_before_it_stays(slots: StepSlots) -> None:
    slots.lay_out(PLACED)
    assert slots.memory is not None
    board = slots.memory.pins.board
    assert board is not None
    sent = [0]
    for step in range(1, 16):
        if step % 3 == 1:  # what was sent has arrived
            board.allow()
        keep(slots, step)
        agree(slots)
        sent += [step] if step % 3 == 1 else []
        assert slots.slots[board.pinned.slot].step == sent[-1]
        assert {*sent[-2:], step} <= held(slots) | {0}


def test_a_rollback_leaves_nothing(slots: StepSlots) -> None:
    slots.lay_out(PLACED)
    keep(slots, 1)
    agree(slots)
    slots.withdraw()
    assert held(slots) == set()
    keep(slots, 1)
    assert held(slots) == {1}


def test_what_needs_more_than_its_share_of_the_memory_is_not_kept(
    slots: StepSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = 3 * shard_plan.file_length(PLACED)
    monkeypatch.setattr(step_slots, "room_to_lock", lambda ranks: 2 * needs - 2)
    assert not slots.lay_out(PLACED)
    assert slots.slots == []
    slots._allowed = None
    monkeypatch.setattr(step_slots, "room_to_lock", lambda ranks: 2 * needs)
    assert slots.lay_out(PLACED)


def test_notes_are_written_once_for_all_attempts_of_a_plan(slots: StepSlots) -> None:
    slots.lay_out(PLACED)
    assert slots.lacks_notes(9)
    slots.note(9, lambda: {"index": memoryview(b"here")})
    assert not slots.lacks_notes(9)
    slots.lay_out(PLACED)  # as the next attempt does
    assert not slots.lacks_notes(9)
    assert slots.lacks_notes(8)
    assert os.fstat(slots._notes).st_size > 0
