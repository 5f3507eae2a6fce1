"""Hands on what is new in a run's metrics, again and again, until told to stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kempner.insight.metrics.exporters import Exporter
from kempner.insight.metrics.lines import Position, read_new
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import replace_durable
from kempner.run.record.run_dir import RunDirectory

PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds between two looks at the file, and at most between two tries while storage fails."""

Opener = Callable[[Position], Exporter]


def kept_position(run: RunDirectory, kind: str) -> Path:
    """The file that says how far the metrics of `run` were handed on to an exporter."""
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
