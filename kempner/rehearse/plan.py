"""Where a rehearsed program is stopped and killed: at the boundaries that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kempner.rehearse.records import Record

MOST = 5
"""Disturbances of one rehearsal."""


@dataclass(frozen=True)
class Disturbance:
    """In `step` the program is asked to stop, or killed; `what` says what that step is."""

    step: int
    kills: bool
    what: str

    @property
    def words(self) -> str:
        """For a person."""
        how = f"killed in step {self.step}" if self.kills else f"stopped after step {self.step}"
        return f"{how} ({self.what})" if self.what else how


def plan(record: Record) -> list[Disturbance]:
    """The disturbances of one run, in their order; the first is a stop, one at least is a kill.

    A stop falls on a boundary, a kill into the step after one. Raises `ValueError` if there are too
    few steps.
    """
    first, last = record.first + 1, record.last - 2
    if last < first:
        raise ValueError("too few steps")
    marks = {step: what for step, what in sorted(boundaries(record).items()) if step <= last}
    if len(marks) < 2:
        for step in (first + (last - first) // 3, first + 2 * (last - first) // 3):
            marks.setdefault(step, "")
    chosen: list[Disturbance] = []
    for step, what in sorted(marks.items()):
        kills = len(chosen) % 2 == 1
        at = step + 1 if kills else step
        if chosen and at <= chosen[-1].step:
            continue
        words = f"after {_article(what)}" if kills and what else what
        chosen.append(Disturbance(min(at, record.last - 1), kills, words))
    if len(chosen) == 1:
        chosen.append(Disturbance(min(chosen[0].step + 2, record.last), kills=True, what=""))
    return _spread(chosen)


def boundaries(record: Record) -> dict[int, str]:
    """The first and the last step of each kind after which something else than a step comes."""
    last = record.last
    found = {
        "an epoch ends": epoch_ends(record),
        "a save": record.saved,
        "an evaluation": _if_rare([s for s, seen in record.evaluations.items() if seen], last),
    }
    marks: dict[int, str] = {}
    for what, steps in found.items():
        inner = [step for step in steps if record.first < step < last - 1]
        for step in {*inner[:1], *inner[-1:]}:
            marks[step] = f"{marks[step]}, {what}" if step in marks else what
    return marks


def epoch_ends(record: Record) -> list[int]:
    """The steps after which samples come again."""
    seen: set[str] = set()
    ends = []
    for step, done in sorted(record.done.items()):
        if seen.intersection(done.samples):
            ends.append(step - 1)
            seen.clear()
        seen.update(done.samples)
    return _if_rare(ends, record.last)


def _if_rare(steps: Sequence[int], last: int) -> list[int]:
    """What comes after every second step or more often is no boundary."""
    return list(steps) if len(steps) * 2 <= last else []


def _article(what: str) -> str:
    return what.replace("an epoch ends", "the end of an epoch")


def _spread(chosen: list[Disturbance]) -> list[Disturbance]:
    """At most `MOST`, the first and the last among them, stops and kills in turns."""
    if len(chosen) <= MOST:
        return chosen
    return [*chosen[: MOST - 1], chosen[-1]]
