"""Follows metrics.jsonl, and passes new points to an exporter; marks where a later attempt repeats
steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic_core import from_json

from kempner.run.output.logs import logger
from kempner.run.process.durable_io import replace_durable
from kempner.run.record.run_dir import RunDirectory

MOST_AT_ONCE = 4 * 2**20
"""Most bytes that are read at once, so that a run of weeks does not fill the memory."""

_NAMES = {
    "loss": "train/loss",
    "margin": "train/margin",
    "accuracy": "train/accuracy",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens": "train/tokens",
    "tokens_per_second": "train/tokens_per_second",
    "mfu": "train/mfu",
    "save_seconds": "train/save_seconds",
    "data_seconds": "train/data_seconds",
    "wait_seconds": "train/wait_seconds",
    "eval_loss": "eval/loss",
    "eval_perplexity": "eval/perplexity",
    "eval_bits_per_byte": "eval/bits_per_byte",
    "eval_accuracy": "eval/accuracy",
}
"""Fields of a line, and their names in exporters."""


@dataclass(frozen=True)
class Position:
    """A reader's position: `offset` in bytes, last step, and step of the last evaluation."""

    offset: int = 0
    step: int = 0
    evaluated: int = 0


@dataclass(frozen=True)
class Point:
    """The values of a step, or of an evaluation after it, by name (`eval/SET/loss` for a set of
    `eval.sets`). `time` is in seconds since the epoch. `cut`: this step repeats an earlier one, and
    points of this step and later ones no longer count."""

    step: int
    time: float
    attempt: int
    values: Mapping[str, float]
    evaluation: bool = False
    cut: bool = False


def read_new(path: Path, since: Position, most: int = MOST_AT_ONCE) -> tuple[list[Point], Position]:
    """The points of the complete lines after `since`, at most `most` bytes, and the new position.

    Empty if the file is missing. A file that is shorter than before is a new one, and read from its
    beginning. Raises `OSError` if it cannot be read.
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
    whole = block[: end or (len(block) if len(block) == most else 0)]  # no line is so long
    points, step, evaluated = list[Point](), since.step, since.evaluated
    for line in whole.splitlines():
        if (point := _point(line)) is None:
            continue
        if point.evaluation:
            if point.step > evaluated:  # an evaluation repeated after a resume is exported once
                evaluated = point.step
                points.append(point)
            continue
        cut = point.step <= step
        step, evaluated = point.step, min(evaluated, point.step - 1) if cut else evaluated
        points.append(replace(point, cut=cut))
    return points, Position(since.offset + len(whole), step, evaluated)


def _point(line: bytes) -> Point | None:
    """Parse a line; None if it is torn, or not a line of kempner."""
    try:
        entry = from_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not _is_count(entry.get("step")):
        return None
    numbers = {name: _number(entry.get(field)) for field, name in _NAMES.items()}
    numbers |= _of_sets(entry.get("eval_sets"))
    values = {name: number for name, number in numbers.items() if number is not None}
    if (written := _number(entry.get("time"))) is None:
        return None
    attempt = entry["attempt"] if _is_count(entry.get("attempt")) else 0
    evaluation = any(field.startswith("eval_") for field in entry)
    return Point(entry["step"], written, attempt, values, evaluation)


def _of_sets(sets: Any) -> dict[str, float | None]:
    """The numbers of the sets of eval.sets."""
    if not isinstance(sets, dict):
        return {}
    return {
        f"eval/{name}/{key}": _number(value)
        for name, numbers in sets.items()
        if isinstance(numbers, dict)
        for key, value in numbers.items()
    }


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


class Exporter(Protocol):
    """Takes the points of a run in order.

    `write` returns when they are stored: an exporter that is opened again continues after the last
    `write` that returned. Methods may raise any error of the library behind them. `at_once` is the
    most bytes of metrics.jsonl for one `write`.
    """

    at_once: int

    def write(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds between two looks at the file, and the most between two attempts while it fails."""

Opener = Callable[[Position], Exporter]


def kept_position(run: RunDirectory, kind: str) -> Path:
    return run.exports / f"{kind}.json"


def load_position(path: Path) -> Position:
    """The stored position; the beginning if there is none, or it cannot be parsed."""
    try:
        return Position(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return Position()


def follow(
    run: RunDirectory, kind: str, open_exporter: Opener, wait: Callable[[float], bool]
) -> bool:
    """Export all points, and new ones until `wait` returns True; returns whether the last export
    worked.

    `wait` takes the seconds to wait, and returns True if only one more export is wanted. A failure
    is logged once, and the exporter is opened again until it works: nothing is skipped.
    """
    path = kept_position(run, kind)
    exporter: Exporter | None = None
    pause, last = PAUSE, wait(0)
    while True:
        try:
            if exporter is None:
                run.exports.mkdir(parents=True, exist_ok=True)
                position = load_position(path)
                exporter = open_exporter(position)
            position = hand_on(run, exporter, position, path)
            pause = PAUSE
        except OSError as error:
            exporter = None
            if pause == PAUSE:
                logger().warning("metrics cannot be exported now", to=kind, error=str(error))
            pause = min(2 * pause, LONGEST_PAUSE)
        if last:
            break
        last = wait(pause)  # points written until now are still exported
    if exporter is not None:
        exporter.close()
    return exporter is not None


def hand_on(run: RunDirectory, exporter: Exporter, since: Position, kept: Path) -> Position:
    """Export new points; stores and returns the position after them."""
    while True:
        points, position = read_new(run.metrics, since, exporter.at_once)
        if position == since:
            return position
        exporter.write(points)
        replace_durable(kept, json.dumps(asdict(position)).encode(), unique="kempner")
        since = position
