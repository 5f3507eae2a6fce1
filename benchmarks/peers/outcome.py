"""What a run has trained on, from the notes of its ranks, beside the undisturbed run."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).with_name("recipes")))
import torch
from shape import EPOCHS, PER_EPOCH, SAMPLES

SLACK = 0.5
"""Seconds that a rank may be ahead of the other within a step."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Notes:
    """The lines of each rank, in the order of time."""

    ranks: Mapping[int, list[Line]]

    @classmethod
    def read(cls, folder: Path) -> Notes:
        return cls(
            {
                int(path.stem.partition("-")[2]): [
                    json.loads(line) for line in path.read_text().splitlines()
                ]
                for path in folder.glob("notes-*.jsonl")
            }
        )

    def steps(self) -> dict[int, dict[int, list[Line]]]:
        """By step and rank, the micro batches of the last time that the step was made.

        The processes of a time are those that live when rank 0 makes the step for the last time.
        """
        ends = {line["pid"]: line["time"] for lines in self.ranks.values() for line in lines}
        last: dict[int, dict[int, list[Line]]] = defaultdict(dict)
        begun: dict[int, float] = {}
        for rank, lines in sorted(self.ranks.items()):
            made: dict[int, list[Line]] = defaultdict(list)
            for line in lines:
                made[line["step"]].append(line)
            for step, of_step in made.items():
                pid = of_step[-1]["pid"]
                mine = [line for line in of_step if line["pid"] == pid]
                begun.setdefault(step, mine[0]["time"])
                if ends[pid] > begun[step] - SLACK:
                    last[step][rank] = mine
        return dict(last)

    def made_again(self) -> int:
        """How many steps were made once more, by the process of rank 0 that made most of them."""
        made = {(line["step"], line["pid"]) for line in self.ranks.get(0, [])}
        return len(made) - len({step for step, _ in made})

    def made(self) -> int:
        """How many micro batches were noted."""
        return sum(map(len, self.ranks.values()))

    def last_step(self) -> int:
        return max((line["step"] for line in self.ranks.get(0, [])), default=0)


def samples(steps: Mapping[int, Mapping[int, list[Line]]]) -> tuple[int, int]:
    """How many samples come twice within an epoch, and how many never come."""
    twice = missed = 0
    for epoch in range(EPOCHS):
        seen: Counter[int] = Counter()
        for step in range(epoch * PER_EPOCH + 1, (epoch + 1) * PER_EPOCH + 1):
            for lines in steps.get(step, {}).values():
                for line in lines:
                    seen.update(line["samples"])
        twice += sum(count - 1 for count in seen.values())
        missed += SAMPLES - len(seen)
    return twice, missed


def measured(folder: Path, undisturbed: Path | None) -> dict[str, Any]:
    """Of a run that is complete; losses and weights only beside an undisturbed one."""
    notes = Notes.read(folder)
    steps = notes.steps()
    twice, missed = samples(steps)
    row: dict[str, Any] = {"twice": twice, "missed": missed, "made_again": notes.made_again()}
    row["steps"] = notes.last_step()
    if undisturbed is not None:
        theirs = Notes.read(undisturbed).steps()
        row["losses_differ"] = sum(_losses(steps.get(s, {})) != _losses(theirs[s]) for s in theirs)
        one, other = (torch.load(f / "final-0.pt") for f in (folder, undisturbed))
        row["weights_equal"] = all(torch.equal(one[key], other[key]) for key in other)
    return row


def _losses(step: Mapping[int, list[Line]]) -> dict[int, list[str]]:
    return {rank: [line["loss"] for line in lines] for rank, lines in step.items()}
