"""What the plots are drawn from: a few hundred points of each series, none of them made up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from kempner.insight.report.series import Numbers
from kempner.insight.report.summary import RunData

Plot: TypeAlias = dict[str, Any]
"""One plot, as report.js reads it."""

BUCKETS = 600
"""Of so many stretches of a series the lowest and the highest value are kept: no spike is lost."""


def decimate(x: Numbers, y: Numbers, buckets: int = BUCKETS) -> tuple[Numbers, Numbers]:
    """At most two points for each bucket: the lowest and the highest, in their order.

    What is no number is left out. `x` does not fall.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= 2 * buckets:
        return x, y
    chosen: list[int] = []
    edges = np.linspace(0, len(x), buckets + 1).astype(int)
    for first, last in pairwise(edges):
        low, high = first + int(np.argmin(y[first:last])), first + int(np.argmax(y[first:last]))
        chosen += sorted({low, high})
    return x[chosen], y[chosen]


def plots_of(runs: Sequence[RunData]) -> list[Plot]:
    """The plots of these runs together; those without a single point are left out."""
    losses, norms = _by_step(runs, "loss", "grad_norm")
    found = [
        _plot("Loss", "nats per token", "step", [*losses, *_held_out(runs)], runs),
        _plot("Gradient norm", "before clipping", "step", norms, runs),
        _plot("Throughput", "tokens/s", *_speeds(runs), runs),
    ]
    return [plot for plot in found if plot["series"]]


def _plot(
    title: str, unit: str, axis: str, series: list[dict[str, Any]], runs: Sequence[RunData]
) -> Plot:
    """Interruptions are marked where there is one run only: else nobody could tell whose."""
    marks = _marks(runs[0], axis) if len(runs) == 1 else []
    drawn = [one for one in series if one["x"]]
    return {"title": title, "unit": unit, "axis": axis, "series": drawn, "marks": marks}


def _by_step(runs: Sequence[RunData], *fields: str) -> list[list[dict[str, Any]]]:
    """For each field a series of each run; of a step that was made twice the last one counts."""
    found: list[list[dict[str, Any]]] = [[] for _ in fields]
    for place, run in enumerate(runs):
        steps = run.steps.last_of_each_step()
        name = run.report.name if len(runs) > 1 else "training"
        for series, field in zip(found, fields, strict=True):
            x, y = decimate(steps.step, getattr(steps, field))
            series.append(_series(name, place, x, y))
    return found


def _held_out(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    found = []
    for place, run in enumerate(runs):
        x, y = decimate(run.evaluations.step, run.evaluations.loss)
        name = f"{run.report.name}, held out" if len(runs) > 1 else "held out"
        alone = len(runs) == 1
        drawn = _series(name, 1 if alone else place, x, y)
        found.append({**drawn, "points": True, "dashed": not alone})
    return found


def _speeds(runs: Sequence[RunData]) -> tuple[str, list[dict[str, Any]]]:
    """The unit of time, and tokens per second by time since the begin.

    The line is interrupted between two attempts.
    """
    unit, seconds = _unit(max(run.report.time.wall for run in runs))
    found = []
    for place, run in enumerate(runs):
        xs: list[float | None] = []
        ys: list[float | None] = []
        budget = max(2, BUCKETS // max(1, len(run.attempts)))
        for attempt in run.attempts:
            steps = run.steps.of_attempt(attempt.number)
            since = (steps.time - run.timeline.begin) / seconds
            x, y = decimate(since, steps.tokens_per_second, budget)
            if len(x):
                xs += [*_short(x, 7), float(f"{x[-1] + 1e-6:.9g}")]
                ys += [*_short(y, 5), None]
        name = run.report.name if len(runs) > 1 else "tokens/s"
        found.append({"name": name, "color": place, "x": xs, "y": ys})
    return unit, found


def _unit(wall: float) -> tuple[str, float]:
    """The unit in which so many seconds are shown, and how many of them it has."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(((name, size) for name, size in units if wall >= 3 * size), ("seconds", 1.0))


def _series(name: str, place: int, x: Numbers, y: Numbers) -> dict[str, Any]:
    return {"name": name, "color": place, "x": [int(v) for v in x], "y": _short(y, 5)}


def _short(values: Numbers, digits: int) -> list[float | None]:
    return [float(f"{value:.{digits}g}") for value in values]


def _marks(run: RunData, axis: str) -> list[dict[str, Any]]:
    begin, (_, unit) = run.timeline.begin, _unit(run.report.time.wall)
    return [
        {
            "x": one.place.step if axis == "step" else round((one.time - begin) / unit, 6),
            "name": str(one.number),
            "failed": one.kind.is_failure,
        }
        for one in run.report.interruptions[:200]
    ]
