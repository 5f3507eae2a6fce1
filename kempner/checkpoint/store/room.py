"""Judges whether the disk has room for the checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.run.output.units import size_text


@dataclass(frozen=True)
class Room:
    """Whether checkpoints fit. `sentence` says what is short, and what to do; empty if nothing is.

    `refused` says that not even one fits.
    """

    sentence: str = ""
    refused: bool = False


def judge_room(free: int, size: int, there: int, keep: int) -> Room:
    """Whether `free` bytes are enough for checkpoints of about `size` bytes each.

    `keep` of them stay, `there` are there already, and the next one is written before the oldest
    is deleted.
    """
    one, left = size_text(size), size_text(free)
    if free < size:
        return Room(
            f"a checkpoint needs about {one}, and {left} are free: free disk space, or set "
            "checkpoint.dir to a larger disk",
            refused=True,
        )
    more = max(1, keep + 1 - there)
    if free < more * size:
        return Room(
            f"{left} are free, and {more} more checkpoints of about {one} are to come: free disk "
            "space, or lower checkpoint.keep_last"
        )
    return Room()
