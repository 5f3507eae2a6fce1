"""The board of a rank: 4 KiB of shared memory in which it tells what its buddy is to have.

All ranks pin the same step at once. Who keeps a rank's slots sends what is pinned to another node,
and then allows the rank to pin another step. Each field is one aligned word of 64 bits, and has one
writer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

SIZE = 4096
_SLOTS = 16


@dataclass(frozen=True)
class Pin:
    """The rank's how-manieth pin it is, from 1, and the number of the slot."""

    number: int
    slot: int


class Board:
    """A board, mapped into this process. Raises `OSError` and `ValueError` if that fails."""

    def __init__(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size < SIZE:
            os.ftruncate(descriptor, SIZE)
        words = mmap.mmap(descriptor, SIZE)
        self._pin, self._allowed, self._since = (
            ctypes.c_uint64.from_buffer(words, 64 * n) for n in range(3)
        )

    @property
    def pinned(self) -> Pin:
        """The last one; number 0 if there was none."""
        return Pin(*divmod(self._pin.value, _SLOTS))

    def pin(self, slot: int) -> None:
        """By the rank: that slot is not overwritten, and is to be sent."""
        self._pin.value = (self.pinned.number + 1) * _SLOTS + slot

    @property
    def may_pin(self) -> bool:
        """Whether what was pinned before has arrived, and may be followed by another."""
        return bool(self._allowed.value > self.pinned.number)

    def allow(self) -> None:
        """By who sends: what is pinned has arrived."""
        self._allowed.value = self.pinned.number + 1

    @property
    def since(self) -> int:
        """As `Branch.since`, of what counts now."""
        return int(self._since.value)

    def go_back(self) -> None:
        """By the rank: what was held so far counts no more."""
        self._since.value += 1
