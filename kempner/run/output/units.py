"""Numbers as people read them: in units that fit, and with nouns that agree with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_FLOPS = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
_SECONDS = (("s", 1.0), ("ms", 1e-3))


def size_text(size: float) -> str:
    """Bytes in the largest decimal unit that gives at least 1: `56.3 GB`, `940 B`."""
    for unit, scale in _BYTES:
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:.0f} B"


def flops_text(flops: float) -> str:
    """Floating-point operations in the largest unit that gives at least 1: `6 TFLOP`."""
    unit, scale = next((each for each in _FLOPS if flops >= each[1]), _FLOPS[-1])
    return f"{flops / scale:,.0f} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds, milliseconds or microseconds, whichever gives at least 1: `14.1 s`, `80 ms`."""
    unit, scale = next((each for each in _SECONDS if seconds >= each[1]), ("us", 1e-6))
    value = seconds / scale
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def count(number: int, one: str, more: str = "") -> str:
    """`1 rank`, `1,024 ranks`; `more` is the plural if that is not `one` with an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers with consecutive ones joined: "0-2, 5"."""
    runs = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]))
    return ", ".join(runs)


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-6, 9` for several, in ascending order."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def name_or_count(ranks: Sequence[int], longest: int = 40) -> str:
    """As `name_ranks`, or `1,093 ranks` if that has more than `longest` characters."""
    name = name_ranks(ranks)
    return name if len(name) <= longest else f"{len(ranks):,} ranks"
