"""Follows metrics.jsonl: what is new in it, and what a later attempt has taken back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json

MOST_AT_ONCE = 4 * 2**20
"""Bytes that are read at once: a run of weeks must not fill the memory of who follows it."""

_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens": "train/tokens",
    "tokens_per_second": "train/tokens_per_second",
    "mfu": "train/mfu",
    "save_seconds": "train/save_seconds",
    "data_seconds": "train/data_seconds",
    "wait_seconds": "train/wait_seconds",
    "eval_loss": "eval/loss",
}
"""Fields of a line, and what they are called where people look at them."""


@dataclass(frozen=True)
class Position:
    """How far a reader is: `offset` in bytes, the last step, and that of the last evaluation."""

    offset: int = 0
    step: int = 0
    evaluated: int = 0


@dataclass(frozen=True)
class Point:
    """The numbers of a step, by name. `time` is in seconds since the epoch.

    With `cut`, what was told of this step and later ones no longer holds: an attempt has gone back
    before it.
    """

    step: int
    time: float
    attempt: int
    values: Mapping[str, float]
    cut: bool = False


def read_new(path: Path, since: Position, most: int = MOST_AT_ONCE) -> tuple[list[Point], Position]:
    """The points of the whole lines after `since`, at most `most` bytes of them.

    Nothing if the file is not there. A file that is shorter than before is another one, and read
    from its beginning. Raises `OSError` if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            if length < since.offset:
                since = Position()
            file.seek(since.offset)
            block = file.read(most)
    except FileNotFoundError:
        return [], since
    end = block.rfind(b"\n") + 1
    whole = block[: end or (len(block) if len(block) == most else 0)]  # none is so long
    points = list(_points(whole.splitlines(), since))
    return points, replace(_after(points, since), offset=since.offset + len(whole))


def _points(lines: Iterable[bytes], since: Position) -> Iterator[Point]:
    """An evaluation that is made up for after a resume is told once."""
    step, evaluated = since.step, since.evaluated
    for line in lines:
        point = _point(line)
        if point is None:
            continue
        if "eval/loss" in point.values:
            if point.step > evaluated:
                evaluated = point.step
                yield point
            continue
        cut = point.step <= step
        step, evaluated = point.step, min(evaluated, point.step - 1) if cut else evaluated
        yield replace(point, cut=cut)


def _point(line: bytes) -> Point | None:
    """None for a line that is torn, or is not as kempner writes them."""
    try:
        entry = from_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not _is_count(entry.get("step")):
        return None
    numbers = {name: _number(entry.get(field)) for field, name in _NAMES.items()}
    values = {name: number for name, number in numbers.items() if number is not None}
    if (written := _number(entry.get("time"))) is None:
        return None
    attempt = entry["attempt"] if _is_count(entry.get("attempt")) else 0
    return Point(entry["step"], written, attempt, values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _after(points: list[Point], since: Position) -> Position:
    position = since
    for point in points:
        if "eval/loss" in point.values:
            position = replace(position, evaluated=point.step)
        else:
            evaluated = min(position.evaluated, point.step - 1) if point.cut else position.evaluated
            position = replace(position, step=point.step, evaluated=evaluated)
    return position
