"""The report page: one self-contained HTML file, readable without JavaScript, which only draws the
plots, from a few hundred measured points of each series."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from kempner.insight.attempts import InterruptionKind
from kempner.insight.report.page import tables
from kempner.insight.report.page.tables import strip
from kempner.insight.report.page.words import date, duration, number, share, text
from kempner.insight.report.series import Numbers
from kempner.insight.report.summary import RunData, RunReport
from kempner.run.output.units import count

Plot: TypeAlias = dict[str, Any]  # one plot, as report.js reads it

BUCKETS = 600
"""Buckets of a series; the lowest and the highest value of each are kept, so that no spike is
lost."""


def decimate(x: Numbers, y: Numbers, buckets: int = BUCKETS) -> tuple[Numbers, Numbers]:
    """The lowest and the highest point of each bucket, in order. Skips NaN and infinities; `x` must
    not decrease."""
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
    """The plots of these runs together; empty plots are left out."""
    losses, norms = _by_step(runs, "loss", "grad_norm")
    found = [
        _plot("Loss", "nats per token, or pair", "step", [*losses, *_held_out(runs)], runs),
        _plot("Gradient norm", "before clipping", "step", norms, runs),
        _plot("Throughput", "tokens/s", *_speeds(runs), runs),
    ]
    return [plot for plot in found if plot["series"]]


def _plot(
    title: str, unit: str, axis: str, series: list[dict[str, Any]], runs: Sequence[RunData]
) -> Plot:
    """A plot; interruptions are marked only if there is a single run."""
    marks = _marks(runs[0], axis) if len(runs) == 1 else []
    drawn = [one for one in series if one["x"]]
    return {"title": title, "unit": unit, "axis": axis, "series": drawn, "marks": marks}


def _by_step(runs: Sequence[RunData], *fields: str) -> list[list[dict[str, Any]]]:
    """A series for each field and run; for a repeated step the last one counts."""
    found: list[list[dict[str, Any]]] = [[] for _ in fields]
    for place, run in enumerate(runs):
        steps = run.steps.last_of_each_step()
        name = run.report.name if len(runs) > 1 else "training"
        for series, field in zip(found, fields, strict=True):
            x, y = decimate(steps.step, getattr(steps, field))
            series.append(_series(name, place, x, y))
    return found


def _held_out(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    found, alone = [], len(runs) == 1
    for place, run in enumerate(runs):
        for color, (of_set, one) in enumerate(run.evaluations.items(), 1):
            if not (of_set or len(one.step)) and len(run.evaluations) > 1:
                continue  # all sets have names
            x, y = decimate(one.step, one.loss)
            name = of_set or "held out"
            name = name if alone else f"{run.report.name}, {name}"
            drawn = _series(name, color if alone else place, x, y)
            found.append({**drawn, "points": True, "dashed": not alone})
    return found


def _speeds(runs: Sequence[RunData]) -> tuple[str, list[dict[str, Any]]]:
    """The unit of time, and tokens per second over the time since the start, with a gap between two
    attempts."""
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


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content security policy: the page loads nothing from outside."""

_DEFINITIONS = """
<p><b>Goodput</b> is the effective training time ratio: the time of steps that count, by the whole
wall time from the first start to the end, queue and pauses included
(<a href="https://arxiv.org/abs/2410.21680">Kokolis et al., arXiv:2410.21680</a>). <b>Without queue
and pauses</b> it is of the time in which machines were held, like Google's runtime goodput (<a href="https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity">ML
productivity goodput</a>).</p>
<p>Of a step that was made twice, one counts as training and the other as made again. Each part of
the time is counted from its own records, the ledger and the metrics of the run; what they do not
explain is shown as unaccounted. A rank counts as one GPU: time on all ranks is the time in which
machines were held, by the number of ranks, so that an interruption's time away costs none of it.
Plots show the lowest and the highest value of each stretch. Young's formula: the interval is
sqrt(2 · cost of a save · time between failures)
(<a href="https://doi.org/10.1145/361147.361115">Young 1974</a>).</p>
"""


def page(runs: Sequence[RunData], version: str) -> str:
    title = ", ".join(run.report.name for run in runs)
    several, plots = len(runs) > 1, plots_of(runs)
    body = [_header(runs)]
    if several:
        body += [_section("Side by side", tables.comparison([run.report for run in runs]))]
        body += [_section("Training", _plots(plots))]
    body += [_run(run, None if several else plots) for run in runs]
    body.append(
        f"<footer><h2>How this is counted</h2>{_DEFINITIONS}"
        f"<p>Made by kempner {text(version)}.</p></footer>"
    )
    data = json.dumps(plots, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{text(title)}: kempner report</title>"
        f"<style>{_asset('uplot.css')}{_asset('report.css')}</style></head>"
        f"<body><main>{''.join(body)}</main>"
        f'<script type="application/json" id="plots">{data}</script>'
        f"<script>/* uPlot, MIT license:\n{_asset('uplot-LICENSE.txt')}*/\n{_asset('uplot.js')}"
        f"</script><script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("kempner.insight.report.page") / "assets" / name).read_text(encoding="utf-8")


def _header(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        names = ", ".join(text(run.report.name) for run in runs)
        return f"<header><p class=kicker>kempner report</p><h1>{names}</h1></header>"
    report = runs[0].report
    return (
        f"<header><p class=kicker>kempner report · {date(report.time.begin)} to "
        f"{date(report.time.end)}</p>"
        f"<h1>{text(report.name)}</h1><p class=lead>{story(report)}</p></header>"
    )


def story(report: RunReport) -> str:
    total = "" if report.training.total_steps is None else f" of {report.training.total_steps:,}"
    who = count(report.time.machines.ranks, "rank")
    if report.time.machines.nodes is not None:
        who += f" ({count(report.time.machines.nodes, 'node')})"
    unit = tables.unit_of(report)
    state = text(report.training.state[:1].upper() + report.training.state[1:])
    sentences = [
        f"{state} after {duration(report.time.wall)} on {who}: "
        f"step {report.training.step:,}{total}.",
        "How much of the wall time trained is not known: its program does not say."
        if report.time.goodput is None
        else f"<b>{share(report.time.goodput)}</b> of the wall time trained.",
    ]
    many = len(report.interruptions)
    if many:
        kinds = [one.kind for one in report.interruptions]
        plural = {InterruptionKind.SILENT: "ends without a message"}
        single = {InterruptionKind.SILENT: "end without a message"}
        listed = ", ".join(
            count(kinds.count(kind), single.get(kind, kind.value), plural.get(kind, ""))
            for kind in InterruptionKind
            if kind in kinds
        )
        sentences.append(
            f"{count(many, 'interruption')} ({listed}) cost {unit.show(report.lost_hours)} "
            f"{unit.name}."
        )
    else:
        sentences.append("Nothing interrupted it.")
    return " ".join(sentences)


def _run(run: RunData, plots: Sequence[Plot] | None) -> str:
    report = run.report
    head = ""
    if plots is None:
        head = f"<h1>{text(report.name)}</h1><p class=lead>{story(report)}</p>"
    used = f" <small>of {count(report.nodes.used, 'node')}</small>" if report.nodes.used else ""
    timeline = strip(run.timeline, report.interruptions)
    parts = [
        head,
        _figures(report),
        _section("Where the time went", timeline + tables.time_table(report)),
        _section("Interruptions", tables.interruption_table(report)),
        "" if plots is None else _section("Training", _plots(plots)),
        _section("Checkpoints", tables.save_table(report)),
        _section(f"Nodes{used}", tables.node_table(report)),
        _section("Advice", tables.advice_list(report)),
    ]
    return f"<article>{''.join(parts)}</article>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _figures(report: RunReport) -> str:
    total = sum(report.time.gpu_hours.values())
    lost = report.lost_hours / total if total else None
    unit = tables.unit_of(report)
    time, many = report.time, len(report.interruptions)
    held = f"{share(time.while_held)} without queue and pauses"
    usual, named = report.training.last_eval_loss, report.training.last_eval_losses
    losses = {} if named and usual is None else {"held out": usual}
    losses |= {text(name): loss for name, loss in named.items()}
    held_out = ", ".join(f"{name} {number(loss, '.3f')}" for name, loss in losses.items())
    cost = f"{unit.show(report.lost_hours)} {unit.name} lost"
    figures = [
        (share(time.goodput), "goodput", held),
        (duration(time.wall), "wall time", count(report.training.attempts, "attempt")),
        (unit.show(total), unit.name, f"{share(lost)} lost to interruptions"),
        (f"{many:,}", "interruption" if many == 1 else "interruptions", cost),
        (number(report.training.last_loss, ".3f"), "last loss", held_out),
    ]
    cells = (
        f"<div><strong>{value}</strong><span>{name}</span><small>{more}</small></div>"
        for value, name, more in figures
    )
    return f'<div class="figures">{"".join(cells)}</div>'


def _plots(plots: Sequence[Plot]) -> str:
    """Placeholders for the plots; they stay empty without JavaScript."""
    places = "".join(
        f'<figure data-plot="{n}"><figcaption>{plot["title"]} <small>{plot["unit"]}</small>'
        f"</figcaption><div></div></figure>"
        for n, plot in enumerate(plots)
    )
    if not places:
        return "<p>This run has logged no steps.</p>"
    return f"{places}<noscript><p>The plots need JavaScript; all else is here.</p></noscript>"
