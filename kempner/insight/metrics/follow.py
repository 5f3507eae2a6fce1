"""Follows metrics.jsonl: what is new in it, and what a later attempt has taken back, is handed on
to an exporter, until told to stop.
"""

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
    "eval_perplexity": "eval/perplexity",
    "eval_bits_per_byte": "eval/bits_per_byte",
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
    """The numbers of a step, or of an evaluation after it, by name. Those of a set of eval.sets are
    `eval/SET/loss` and so on. `time` is in seconds since the epoch.

    With `cut`, what was told of this step and later ones no longer holds: an attempt has gone back
    before it.
    """

    step: int
    time: float
    attempt: int
    values: Mapping[str, float]
    evaluation: bool = False
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
    points, step, evaluated = list[Point](), since.step, since.evaluated
    for line in whole.splitlines():
        if (point := _point(line)) is None:
            continue
        if point.evaluation:
            if point.step > evaluated:  # one that is made up for after a resume is told once
                evaluated = point.step
                points.append(point)
            continue
        cut = point.step <= step
        step, evaluated = point.step, min(evaluated, point.step - 1) if cut else evaluated
        points.append(replace(point, cut=cut))
    return points, Position(since.offset + len(whole), step, evaluated)


def _point(line: bytes) -> Point | None:
    """None for a line that is torn, or is not as kempner writes them."""
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
    """Takes the points of a run in their order.

    `write` returns when they are kept: an exporter that is opened again goes on after the last
    `write` that returned. Each method may raise whatever the library behind it raises. `at_once`
    are the bytes of metrics.jsonl that one `write` gets at most.
    """

    at_once: int

    def write(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds between two looks at the file, and at most between two tries while storage fails."""

Opener = Callable[[Position], Exporter]


def kept_position(run: RunDirectory, kind: str) -> Path:
    return run.exports / f"{kind}.json"


def load_position(path: Path) -> Position:
    """From the beginning if nothing is kept, or nothing that makes sense."""
    try:
        return Position(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return Position()


def follow(
    run: RunDirectory, kind: str, open_exporter: Opener, wait: Callable[[float], bool]
) -> bool:
    """Export all that is there and, as long as `wait` returns False, what comes; whether the last
    time did it.

    `wait` takes the seconds to wait and returns whether this was the last time. A failure is told
    once, and the exporter is opened anew until it works: nothing is skipped.
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
        last = wait(pause)  # what was written until now is handed on once more
    if exporter is not None:
        exporter.close()
    return exporter is not None


def hand_on(run: RunDirectory, exporter: Exporter, since: Position, kept: Path) -> Position:
    """Export what is new; returns how far that is, which is kept, too."""
    while True:
        points, position = read_new(run.metrics, since, exporter.at_once)
        if position == since:
            return position
        exporter.write(points)
        replace_durable(kept, json.dumps(asdict(position)).encode(), unique="kempner")
        since = position
