"""How far a run is and how fast it goes, from the last lines of its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, TypeGuard

RECENT = 50
"""Logged steps of which the speed is the mean."""


@dataclass(frozen=True)
class Pace:
    """How fast the last steps of the last attempt were made; what is not known is None.

    `mfu` is the model FLOPs utilization (0 to 1), and `logged_every` the seconds from one logged
    step to the next: medians, the others are means. `seconds_left` is until the last step. `waited`
    has the shares (0 to 1) of their time that rank 0 waited, for `data`, `others` and `saves`.
    """

    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    logged_every: float | None = None
    waited: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The last logged step, of how many, and its loss; what is not known is None.

    `logged_at` is in seconds since the epoch; losses are in nats per token.
    """

    step: int | None = None
    total: int | None = None
    logged_at: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    pace: Pace = Pace()


def measure(lines: Iterable[Mapping[str, Any]], total: int | None) -> Progress:
    """What the lines of the metrics come to; `total` is the number of steps of the whole run.

    Lines that are not as kempner writes them are passed over.
    """
    told = [line for line in lines if _is_number(line.get("step"))]
    steps = [line for line in told if "loss" in line]
    held_out = [line["eval_loss"] for line in told if _is_number(line.get("eval_loss"))]
    if not steps:
        return Progress(total=total, eval_loss=held_out[-1] if held_out else None)
    last = steps[-1]
    recent = [line for line in steps[-RECENT:] if line.get("attempt") == last.get("attempt")]
    first = recent[0]
    seconds, tokens, made = (_grown(first, last, key) for key in ("time", "tokens", "step"))
    used = [line["mfu"] for line in recent if _is_number(line.get("mfu"))]
    each = seconds / made if seconds and made else None
    left = None if total is None or each is None else max(0, total - last["step"]) * each
    pace = Pace(
        tokens_per_second=tokens / seconds if tokens and seconds and made else None,
        mfu=median(used) if used else None,
        seconds_per_step=each,
        seconds_left=left,
        logged_every=_usual_gap(recent),
        waited=_waited(recent[1:], seconds) if seconds else {},
    )
    return Progress(
        step=int(last["step"]),
        total=total,
        logged_at=last["time"] if _is_number(last.get("time")) else None,
        loss=last["loss"] if _is_number(last["loss"]) else None,
        eval_loss=held_out[-1] if held_out else None,
        pace=pace,
    )


def curve(lines: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """The values of a number in the lines, oldest first."""
    return [line[key] for line in lines if _is_number(line.get(key)) and "loss" in line]


_WAITS = {"data": "data_seconds", "others": "wait_seconds", "saves": "save_seconds"}


def _waited(lines: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """Shares of so many `seconds`, in which the lines were written."""
    found = {}
    for name, key in _WAITS.items():
        told = [line[key] for line in lines if _is_number(line.get(key))]
        if told:
            found[name] = round(min(1.0, sum(told) / seconds), 4)
    return found


def _usual_gap(lines: Sequence[Mapping[str, Any]]) -> float | None:
    times = [line["time"] for line in lines if _is_number(line.get("time"))]
    return median(after - before for before, after in pairwise(times)) if times[1:] else None


def _grown(first: Mapping[str, Any], last: Mapping[str, Any], key: str) -> float | None:
    """By how much a number has grown; None if it has not."""
    before, after = first.get(key), last.get(key)
    if not (_is_number(before) and _is_number(after)):
        return None
    return after - before if after > before else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
