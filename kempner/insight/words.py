"""Many numbers in few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers with neighbours drawn together: "0-2, 5"."""
    runs = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]))
    return ", ".join(runs)


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-6, 9` for several, in ascending order."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def name_or_count(ranks: Sequence[int], longest: int = 40) -> str:
    """The same, or `1,093 ranks` where that would take too many characters."""
    name = name_ranks(ranks)
    return name if len(name) <= longest else f"{len(ranks):,} ranks"
