"""What is done to each peer: an interruption at a step, or in an evaluation, and how it comes."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("recipes")))
from shape import EVALUATE_EVERY, PER_EPOCH, SAVE_EVERY, STEPS


class How(StrEnum):
    """How the interruption comes."""

    NOT = "not"
    STOP = "the warning signal, to what the scheduler has started"
    EVERY_PROCESS = "the warning signal, to every process of the job"
    APART = "the warning signal, to one rank half a second after the other"
    KILL = "SIGKILL to a rank"
    HANG = "a rank that waits for ever"


@dataclass(frozen=True)
class Scenario:
    """One interruption, by rank `rank`; `place` is as the recipes have it, such as "within 17"."""

    name: str
    how: How = How.NOT
    place: str = ""
    rank: int = 0
    workers: int = 0
    ranks_after: int = 2


def scenarios(seed: int) -> list[Scenario]:
    """Each kind once; the steps that are no boundary are drawn."""
    drawn = random.Random(seed)
    boundaries = {PER_EPOCH, SAVE_EVERY, EVALUATE_EVERY}
    inner = [
        step
        for step in range(PER_EPOCH + 1, STEPS - PER_EPOCH)
        if all(step % boundary not in (0, boundary - 1) for boundary in boundaries)
    ]
    saved = 4 * SAVE_EVERY
    return [
        Scenario("undisturbed"),
        Scenario("epoch", How.STOP, f"end of {2 * PER_EPOCH}"),
        Scenario("save", How.STOP, f"end of {saved}"),
        Scenario("evaluation", How.STOP, f"evaluation after {3 * EVALUATE_EVERY}"),
        Scenario("random", How.STOP, f"within {drawn.choice(inner)}"),
        Scenario("workers", How.EVERY_PROCESS, f"within {drawn.choice(inner)}", workers=2),
        Scenario("apart", How.APART, f"within {drawn.choice(inner)}"),
        Scenario("kill", How.KILL, f"within {drawn.choice(inner)}", rank=1),
        Scenario("world", How.STOP, f"within {drawn.choice(inner)}", ranks_after=1),
        Scenario("hang", How.HANG, f"within {drawn.choice(inner)}", rank=1),
    ]
