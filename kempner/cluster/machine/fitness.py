"""What a node must have to train on it."""

from __future__ import annotations

MEMORY = 0.02
"""Share of a node's memory that must be free before ranks are there."""

ROOM = 32 * 2**20
"""Bytes that must be free for temporary files, and in /dev/shm, where NCCL's ranks of a node meet.
"""

OPEN_FILES = (256, 4)
"""Open files that a rank needs, and more for each rank of the world: rank 0 hears from every one,
in each group and as the host of their store."""

SKEW = 60.0
"""Seconds that a node's clock may differ: munge, by which Slurm knows its nodes, bears with 300."""

SHARED_WITHIN = 5.0
"""Seconds after which a file that another host has written is seen, on any file system that is
shared; network file systems remember for a while that a file was not there."""


def open_files_needed(ranks: int) -> int:
    """How many files a rank of a world of `ranks` may have open at once."""
    least, each = OPEN_FILES
    return least + each * ranks


def clock_skew(time: float, during: tuple[float, float]) -> float:
    """Seconds by which a clock that showed `time` is ahead at least; 0 if it may be right.

    `during` is when it was asked and when it had answered, by our own clock.
    """
    start, end = during
    return max(0.0, time - end) + min(0.0, time - start)
