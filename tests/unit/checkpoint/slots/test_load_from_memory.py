"""A load takes from memory what is the same there, by its checksums, and the rest from disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from saved import commit_state, small_state

from kempner.checkpoint.format.manifest import TrainState, read
from kempner.checkpoint.io.verify import MemoryCopy
from kempner.checkpoint.slots.memory import (
    IMAGE_AT,
    Branch,
    LentSlots,
    SlotContents,
    SlotHolder,
    SlotMemory,
    images_of,
)
from kempner.checkpoint.tensors.load import LoadedBytes, fill, open_contents
from kempner.run.record.run_dir import RunDirectory

FILE = "__1_0.distcp"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return commit_state(RunDirectory(tmp_path), small_state(), step=5, world=2)


def keep(content: bytes, step: int = 5) -> LentSlots:
    """Slots of rank 1, of which the second holds a step."""
    lent = SlotHolder().lend(1, {})
    slot = SlotMemory.grown(lent.slots[1], len(content))
    slot.image[:] = content
    slot.publish(SlotContents(TrainState(step), Branch("dead"), 1, 2, 0, 0, len(content)))
    return lent


def load(checkpoint: Path, memory: dict[str, MemoryCopy]) -> LoadedBytes:
    """Every tensor, equal to what was saved."""
    manifest = read(checkpoint, worked=True)
    table = {key: torch.zeros_like(tensor) for key, tensor in small_state().items()}
    loaded = fill(table, checkpoint, manifest, open_contents(checkpoint, manifest), memory)
    for key, tensor in small_state().items():
        assert torch.equal(table[key], tensor), key
    return loaded


def test_what_is_in_memory_is_not_read_from_disk(checkpoint: Path) -> None:
    content = (checkpoint / FILE).read_bytes()
    memory = images_of(keep(content), 5)
    (checkpoint / FILE).write_bytes(b"")
    loaded = load(checkpoint, memory)
    assert 0 < len(content) <= loaded.from_memory < loaded.bytes


@pytest.mark.parametrize("at", [0, -1])
def test_what_is_not_the_same_there_comes_from_disk(checkpoint: Path, at: int) -> None:
    changed = bytearray((checkpoint / FILE).read_bytes())
    changed[at] ^= 1
    lent = keep(bytes(changed))
    assert load(checkpoint, images_of(lent, 5)).from_memory <= len(changed)
    os.ftruncate(lent.slots[1], IMAGE_AT)  # a new attempt has begun
    assert load(checkpoint, images_of(lent, 5)).from_memory == 0


def test_another_step_or_another_length_is_not_looked_at(checkpoint: Path) -> None:
    content = (checkpoint / FILE).read_bytes()
    assert images_of(keep(content, step=4), 5) == images_of(None, 5) == {}
    assert load(checkpoint, images_of(keep(content + b"x"), 5)).from_memory == 0
