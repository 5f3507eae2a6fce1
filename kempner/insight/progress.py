"""How far a run is and how fast it goes, from its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

RECENT = 50
"""Logged steps of which the speed is the mean."""


@dataclass(frozen=True)
class Progress:
    """The last step, of how many, and its loss; what is not known is None."""

    step: int | None = None
    total: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    """Over the last steps of the last attempt."""
    seconds_left: float | None = None
    """Until the last step, at that speed."""


def measure(lines: Iterable[Mapping[str, Any]], total: int | None) -> Progress:
    """What the lines of the metrics come to; `total` is the number of steps of the whole run.

    Lines that are not as kempner writes them are passed over.
    """
    steps = [line for line in lines if "loss" in line and _is_number(line.get("step"))]
    if not steps:
        return Progress(total=total)
    last = steps[-1]
    recent = [line for line in steps[-RECENT:] if line.get("attempt") == last.get("attempt")]
    first = recent[0]
    seconds, tokens, made = (_grown(first, last, key) for key in ("time", "tokens", "step"))
    speed = left = None
    if seconds and made:
        speed = tokens / seconds if tokens else None
        left = None if total is None else max(0, total - last["step"]) * seconds / made
    loss = last["loss"] if _is_number(last["loss"]) else None
    return Progress(int(last["step"]), total, loss, speed, left)


def _grown(first: Mapping[str, Any], last: Mapping[str, Any], key: str) -> float | None:
    """By how much a number has grown; None if it has not."""
    before, after = first.get(key), last.get(key)
    if not (_is_number(before) and _is_number(after)):
        return None
    return after - before if after > before else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
