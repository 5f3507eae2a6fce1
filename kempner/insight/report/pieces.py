"""Pieces of time: arrays of begin, end and category, that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kempner.insight.report.categories import Category
from kempner.insight.report.series import Numbers

Part: TypeAlias = tuple[Category | NDArray[np.int64], Numbers]
"""A category, or one per interval, and so many seconds of each interval."""

LEAST = 1e-9
"""Pieces that are shorter, in seconds, are none."""


@dataclass(frozen=True)
class Pieces:
    """Pieces by time. `begin` and `end` are seconds since the epoch."""

    begin: Numbers
    end: Numbers
    category: NDArray[np.int64]

    @classmethod
    def of(cls, pieces: Iterable[tuple[float, float, Category]]) -> Pieces:
        """From (begin, end, category); what is empty is left out, neighbours become one."""
        kept = [(b, e, c) for b, e, c in pieces if e - b > LEAST]
        return cls(
            np.array([b for b, _, _ in kept], np.float64),
            np.array([e for _, e, _ in kept], np.float64),
            np.array([c for _, _, c in kept], np.int64),
        )._merged()

    @classmethod
    def in_intervals(cls, bounds: Numbers, parts: Sequence[Part]) -> Pieces:
        """Each interval between two of `bounds` is filled, from its begin, with `parts`."""
        count = len(bounds) - 1
        seconds = np.stack([lengths for _, lengths in parts], axis=1)
        ends = bounds[:-1, None] + np.cumsum(seconds, axis=1)
        begins = ends - seconds
        kinds = np.stack([np.broadcast_to(np.int64(kind), (count,)) for kind, _ in parts], axis=1)
        kept = seconds.ravel() > LEAST
        flat = (array.ravel()[kept] for array in (begins, ends, kinds))
        return cls(*flat)._merged()  # type: ignore[arg-type]

    @classmethod
    def chain(cls, many: Sequence[Pieces]) -> Pieces:
        """One after the other."""
        if not many:
            return cls.of(())
        columns = ("begin", "end", "category")
        joined = (np.concatenate([getattr(pieces, name) for pieces in many]) for name in columns)
        return cls(*joined)

    def _merged(self) -> Pieces:
        """Neighbours of the same category become one."""
        if len(self.begin) < 2:
            return self
        same = self.category[1:] == self.category[:-1]
        touching = np.abs(self.begin[1:] - self.end[:-1]) < 1e-6
        first = np.concatenate(([True], ~(same & touching)))
        last = np.concatenate((first[1:], [True]))
        return Pieces(self.begin[first], self.end[last], self.category[first])

    def seconds(self) -> Numbers:
        """Of each category, by its number."""
        return np.bincount(self.category, self.end - self.begin, len(Category)).astype(np.float64)

    def shares(self, bounds: Numbers) -> Numbers:
        """Seconds of each category (columns) between two neighbours of `bounds` (rows)."""
        rows = np.zeros((len(bounds) - 1, len(Category)))
        for category in Category:
            chosen = self.category == category
            rows[:, category] = np.diff(_covered(self.begin[chosen], self.end[chosen], bounds))
        return rows


def _covered(begin: Numbers, end: Numbers, until: Numbers) -> Numbers:
    """How many seconds before each time in `until` lie in one of these pieces, which are sorted."""
    if not len(begin):
        return np.zeros(len(until))
    whole = np.concatenate(([0.0], np.cumsum(end - begin)))
    place = np.searchsorted(begin, until, side="right")
    inside = np.clip(end[np.maximum(place - 1, 0)] - until, 0.0, None) * (place > 0)
    return np.asarray(whole[place] - inside)


def overlaps(bounds: Numbers, spans: Sequence[tuple[float, float]]) -> Numbers:
    """Seconds of each interval between two of `bounds` that lie in one of `spans`."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    begins, ends = (np.array([span[side] for span in joined], np.float64) for side in (0, 1))
    return np.diff(_covered(begins, ends, bounds))
