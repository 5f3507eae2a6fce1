"""Copies of what the ranks of another node hold: whole ones, in memory of this node.

Of each rank there are two. What arrives takes the place of the older one, so that the newer one is
there until the next is whole.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from kempner.checkpoint.slots.memory import COPIES, Held, Notes, SlotMemory


@dataclass
class _Copy:
    """A descriptor, its memory, and what that holds."""

    descriptor: int
    memory: SlotMemory
    held: Held | None = None


@dataclass
class CopyHolder:
    """The copies that this node keeps for others. Safe to use from several threads."""

    _copies: dict[int, list[_Copy]] = field(default_factory=dict)
    _notes: Notes | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, held: Held) -> SlotMemory:
        """Where such an image is to be received; it holds nothing from now on. Raises `OSError`."""
        with self._lock:
            copies = self._copies.setdefault(held.rank, [])
            if len(copies) < COPIES and not any(_same(copy.held, held) for copy in copies):
                copies.append(_new(held))
            copy = min(copies, key=lambda copy: _worth(copy.held, held))
            if len(copy.memory.image) != held.image:
                os.close(copy.descriptor)
                copies.remove(copy)
                copy = _new(held)
                copies.append(copy)
            copy.memory.withdraw()
            copy.held = None
            return copy.memory

    def publish(self, memory: SlotMemory, held: Held, notes: Notes | None) -> None:
        """It has arrived as it was sent. Rank 0 sends its notes with it, at least once."""
        with self._lock:
            self._notes = notes or self._notes
            memory.publish(held)
            for copy in self._copies.get(held.rank, ()):
                if copy.memory is memory:
                    copy.held = held

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            for copies in self._copies.values():
                for copy in copies:
                    os.close(copy.descriptor)
            self._copies, self._notes = {}, None

    def slots(self) -> dict[int, list[SlotMemory]]:
        """All copies, by rank."""
        with self._lock:
            return {rank: [copy.memory for copy in kept] for rank, kept in self._copies.items()}

    def notes(self) -> Notes | None:
        """Rank 0's, if that is one of those kept here."""
        with self._lock:
            return self._notes


def _new(held: Held) -> _Copy:
    descriptor = os.memfd_create(f"kempner-copy-{held.rank}")
    return _Copy(descriptor, SlotMemory.grown(descriptor, held.image))


def _same(kept: Held | None, held: Held) -> bool:
    return kept is not None and _worth(kept, held) == (0, 0)


def _worth(kept: Held | None, held: Held) -> tuple[int, int]:
    """The lowest is overwritten: the same once more, then what counts no more, then the oldest."""
    if kept is None or kept.branch.nonce != held.branch.nonce:
        return 1, 0
    step = kept.train_state.step
    if (kept.branch, step) == (held.branch, held.train_state.step):
        return 0, 0
    return 2 + kept.branch.since, step
