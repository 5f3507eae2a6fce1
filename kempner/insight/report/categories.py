"""What a run's wall time went into: the categories, in the order in which they are shown."""

from __future__ import annotations

from enum import IntEnum


class Category(IntEnum):
    """One category; each second of the wall time is in one at most. The rest is `UNACCOUNTED`."""

    TRAIN = 0
    EVAL = 1
    SAVE = 2
    RECOMPUTED = 3
    HUNG = 4
    STORAGE = 5
    START = 6
    LOAD = 7
    STOP = 8
    QUEUE = 9
    IDLE = 10
    UNACCOUNTED = 11

    @property
    def key(self) -> str:
        """As `--json` and the page's style sheet spell it."""
        return self.name.lower()

    @property
    def label(self) -> str:
        """As a person reads it."""
        return _WORDS[self][0]

    @property
    def meaning(self) -> str:
        """What it counts, from which records."""
        return _WORDS[self][1]

    @property
    def holds_machines(self) -> bool:
        """Whether the job has its GPUs meanwhile."""
        return self not in (Category.QUEUE, Category.IDLE)


_WORDS = {
    Category.TRAIN: ("Training", "steps that count, each one once"),
    Category.EVAL: ("Evaluation", "on held-out data, while training waits"),
    Category.SAVE: (
        "Held up by saves",
        "waiting for the save before, and until the state was copied",
    ),
    Category.RECOMPUTED: (
        "Made again",
        "steps that an earlier attempt had made after its last checkpoint, and steps cut off",
    ),
    Category.HUNG: (
        "Hung",
        "from the last step until it was noticed that nothing moves, and looked into",
    ),
    Category.STORAGE: (
        "Waiting for storage",
        "files that could not be read or written for a while, or a save that took far too long",
    ),
    Category.START: (
        "Start",
        "supervisor, node checks, launch, imports, rendezvous, and what the first step takes more",
    ),
    Category.LOAD: ("Load", "reading the checkpoint, after the ranks have met"),
    Category.STOP: ("Stop", "the last save, and until every rank is gone"),
    Category.QUEUE: ("Queue", "from the requeue until the next attempt; no machine is held"),
    Category.IDLE: ("Not running", "between an end and the next start by somebody"),
    Category.UNACCOUNTED: ("Unaccounted", "no record says what happened then"),
}
