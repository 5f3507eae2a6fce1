"""The tables of a run (time, interruptions, checkpoints, nodes, advice), and its timeline as SVG:
what the run did at each moment of its wall time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from kempner.insight.report.page.words import UNKNOWN, TimeUnit, duration, number, share, text
from kempner.insight.report.summary import Cost, Interruption, RunReport
from kempner.insight.report.timeline import Category, Timeline
from kempner.run.output.units import count, size_text

LEAST = 0.0005  # seconds of a category below which it is not shown
MANY = 100  # most rows of a table; a sentence sums up the others


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], name: str = "") -> str:
    """A table of HTML cells; a head that begins with `>` marks a column of numbers."""
    kinds = [' class="n"' if head.startswith(">") else "" for head in heads]
    top = "".join(map(_head, heads))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{k} data-head="{h.removeprefix(">")}">{cell}</td>'
            for k, h, cell in zip(kinds, heads, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<table class="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def _head(head: str) -> str:
    """The cell above a column; an empty one is not a `th`, which screen readers would read out."""
    kind = ' class="n"' if head.startswith(">") else ""
    return f"<th{kind}>{head.removeprefix('>')}</th>" if head else "<td></td>"


def unit_of(*reports: RunReport) -> TimeUnit:
    counted = " or ".join(sorted({report.time.machines.counted for report in reports}))
    return TimeUnit.fit(max(sum(r.time.gpu_hours.values()) for r in reports), counted)


def time_table(report: RunReport) -> str:
    unit = unit_of(report)
    wall = report.time.wall or 1.0
    widest = max(report.time.seconds.values()) or 1.0
    rows = []
    for category in Category:
        seconds = report.time.seconds[category.key]
        if seconds < LEAST:
            if category is not Category.UNACCOUNTED:
                continue
            seconds = 0.0
        part = seconds / wall
        swatch = f'<i class="swatch {category.key}"></i>'
        bar = f'<i class="bar {category.key}" style="width:{100 * seconds / widest:.2f}%"></i>'
        words = f"<b>{category.label}</b> <small>{category.meaning}</small>"
        gpu = unit.show(report.time.gpu_hours[category.key]) if category.holds_machines else UNKNOWN
        rows.append((swatch + words, duration(seconds), share(part), gpu, bar))
    return table(("What", ">Time", ">Share", f">{unit.name}", "Compared"), rows, "time")


def interruption_table(report: RunReport) -> str:
    if not report.interruptions:
        return "<p>Nothing interrupted this run.</p>"
    shown: Sequence[Interruption] = report.interruptions
    left_out, unit = "", unit_of(report)
    if len(shown) > MANY:
        dearest = sorted(shown, key=lambda one: -one.cost.gpu_hours)[:MANY]
        rest = sum(i.cost.gpu_hours for i in shown) - sum(i.cost.gpu_hours for i in dearest)
        left_out = (
            f"<p>The {MANY} dearest are shown; the other {len(shown) - MANY:,} cost "
            f"{unit.show(rest)} {unit.name}.</p>"
        )
        shown = sorted(dearest, key=lambda one: one.number)
    rows = [_interruption(one, report, unit) for one in shown]
    heads = ("", ">After the start", "Cause", "Where", ">At step", ">Steps again", f">{unit.name}")
    return table(heads, rows, "interruptions") + left_out


def _interruption(one: Interruption, report: RunReport, unit: TimeUnit) -> tuple[str, ...]:
    kind = "failed" if one.kind.is_failure else "asked"
    spent = [
        f"{words} {duration(seconds)}{more}"
        for words, seconds, more in (
            ("hung", one.cost.hung_seconds, _hang_parts(one.cost)),
            ("ending", one.cost.stop_seconds, ""),
            ("restart and load", one.cost.restart_seconds, ""),
            ("made again", one.cost.made_again_seconds, ""),
            ("away", one.cost.away_seconds, ""),
        )
        if seconds >= 0.05
    ]
    detail = f"<small>{text(one.detail)}</small>" if one.detail else ""
    where = [] if one.place.rank is None else [f"rank {one.place.rank}"]
    where += [f"node {text(one.place.node)}"] if one.place.node else []
    return (
        f'<span class="mark {kind}">{one.number}</span>',
        duration(one.time - report.time.begin),
        f"<b>{text(one.cause)}</b> {detail} <small>{', '.join(spent)}</small>",
        ", ".join(where) or UNKNOWN,
        f"{one.place.step:,}",
        UNKNOWN if one.place.steps_lost is None else f"{one.place.steps_lost:,}",
        unit.show(one.cost.gpu_hours),
    )


def _hang_parts(cost: Cost) -> str:
    """The parts of a hang's time; its cause covers only the time that the supervisor watched."""
    if cost.still_seconds is None:
        return ""
    evidence = cost.evidence_seconds or 0.0
    parts = (
        (cost.hung_seconds - cost.still_seconds, "until the last sign of a rank"),
        (cost.still_seconds - evidence, "until that was a hang"),
        (evidence, "for its evidence"),
    )
    details = ", ".join(f"{duration(seconds)} {what}" for seconds, what in parts if seconds >= 0.05)
    return f" since the last step ({details})"


def save_table(report: RunReport) -> str:
    saves = report.saves
    if not saves.committed:
        return "<p>No checkpoint was saved.</p>"
    every = "" if saves.interval_steps is None else f", every {saves.interval_steps:,} steps"
    failed = f"; {count(saves.failed, 'save')} failed" if saves.failed else ""
    none = saves.window_seconds is None
    window = "no stop had a deadline" if none else "the shortest of this run"
    took = saves.took
    worst = f"median; 95 % within {duration(took.p95)}, at worst {duration(took.worst)}"
    largest = f"largest {size_text(saves.largest_bytes)}"
    rows = [
        ("Saved", f"{saves.committed:,}{every}{failed}", largest),
        ("Until durable", duration(took.median), worst),
        ("Training held up", duration(saves.held_up_seconds), "by each, in the mean"),
        ("A stop needs", duration(saves.needed_seconds), "two saves, two steps and a margin"),
        ("Warning", duration(saves.window_seconds), window),
    ]
    return table(("Checkpoints", "", ""), rows, "facts")


def node_table(report: RunReport) -> str:
    if not report.nodes.noted:
        return "<p>Nothing is known against any node.</p>"
    rows = [
        (
            f"<b>{text(node.name)}</b>",
            f"{node.failures:,}",
            f"{node.lost:,}",
            "<br>".join(text(remark) for remark in node.remarks[:5]) or UNKNOWN,
        )
        for node in report.nodes.noted[:MANY]
    ]
    more = len(report.nodes.noted) - len(rows)
    beyond = f"<p>And {more:,} more nodes, with less to tell.</p>" if more > 0 else ""
    heads = ("Node", ">Failures of its ranks", ">Lost", "What is known")
    return table(heads, rows, "nodes") + beyond


def advice_list(report: RunReport) -> str:
    if not report.advice:
        return "<p>What was measured suggests no change.</p>"
    items = (f"<li><b>{text(a.what)}.</b> {text(a.why)}</li>" for a in report.advice)
    return f"<ul>{''.join(items)}</ul>"


def _losses_of_sets(reports: Sequence[RunReport]) -> Iterator[tuple[str, list[str]]]:
    named = [report.training.last_eval_losses for report in reports]
    for name in dict.fromkeys(name for losses in named for name in losses):
        yield f"Loss on {text(name)}", [number(losses.get(name), ".4f") for losses in named]


def comparison(reports: Sequence[RunReport]) -> str:
    unit = unit_of(*reports)
    lines: list[tuple[str, list[str]]] = [
        ("State", [text(r.training.state) for r in reports]),
        ("Goodput", [f"<b>{share(r.time.goodput)}</b>" for r in reports]),
        ("Goodput without queue and pauses", [share(r.time.while_held) for r in reports]),
        ("Wall time", [duration(r.time.wall) for r in reports]),
        ("Ranks", [number(r.time.machines.ranks) for r in reports]),
        ("Nodes", [number(r.time.machines.nodes) for r in reports]),
        (unit.name, [unit.show(sum(r.time.gpu_hours.values())) for r in reports]),
        ("Interruptions", [f"{len(r.interruptions):,}" for r in reports]),
        (f"What they cost, in {unit.name}", [unit.show(r.lost_hours) for r in reports]),
        ("Step", [f"{r.training.step:,}" for r in reports]),
        ("Last loss", [number(r.training.last_loss, ".4f") for r in reports]),
        ("Held-out loss", [number(r.training.last_eval_loss, ".4f") for r in reports]),
        *_losses_of_sets(reports),
        ("Tokens/s", [number(r.training.tokens_per_second) for r in reports]),
    ]
    for category in Category:
        spent = [(r.time.seconds[category.key], r.time.wall or 1.0) for r in reports]
        if any(seconds >= 0.05 for seconds, _ in spent):
            lines.append((category.label, [share(seconds / wall) for seconds, wall in spent]))
    heads = ("", *(f'><i class="dot c{n % 6}"></i>{text(r.name)}' for n, r in enumerate(reports)))
    top = "".join(map(_head, heads))
    body = "".join(
        f"<tr><th>{name}</th>{''.join(f'<td class=n>{c}</td>' for c in cells)}</tr>"
        for name, cells in lines
    )
    return (
        f'<div class="wide"><table class="compare"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


COLUMNS, HEIGHT = 400, 100
"""Each column is an equal part of the wall time; in it the categories are stacked by their
shares."""

THINNEST = 0.004  # share of a column below which a category would be invisible
CROWDED = 0.022  # marks closer to each other than this share of the width become one

_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def strip(timeline: Timeline, interruptions: Sequence[Interruption]) -> str:
    bounds = np.linspace(timeline.begin, timeline.end, COLUMNS + 1)
    width = max(timeline.end - timeline.begin, 1e-9)
    parts = timeline.pieces.shares(bounds) / (width / COLUMNS)
    parts[:, Category.UNACCOUNTED] += np.clip(1 - parts.sum(axis=1), 0, None)
    label = "; ".join(
        f"{category.label} {duration(float(seconds))}"
        for category, seconds in zip(Category, timeline.seconds(), strict=True)
        if seconds >= 0.05
    )
    drawing = (
        f'<svg viewBox="0 0 {COLUMNS} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(label)}">{_rectangles(parts)}</svg>'
    )
    return (
        f'<div class="strip"><div class="marks">{_marks(timeline, interruptions)}</div>'
        f'{drawing}<div class="axis">{_axis(width)}</div>'
        f"{_legend(interruptions, width)}</div>"
    )


def _legend(interruptions: Sequence[Interruption], width: float) -> str:
    kinds = (
        ("failed", "something failed or hung", any(i.kind.is_failure for i in interruptions)),
        ("asked", "a stop was asked for", not all(i.kind.is_failure for i in interruptions)),
    )
    marks = [f'<i class="mark {kind}"></i> {words}' for kind, words, there in kinds if there]
    numbered = "; numbers as in the table of interruptions" if marks else ""
    height = (
        f"A column is {duration(width / COLUMNS)} wide; the height of a colour in it is its share "
        "of that time. Colours as in the table below."
    )
    return f'<p class="legend"><span>{", ".join(marks)}{numbered}</span> <span>{height}</span></p>'


def _rectangles(parts: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> str:
    """The SVG rectangles; equal neighbouring columns become one rectangle per category."""
    rounded = np.round(parts, 2)
    drawn = []
    changes = np.flatnonzero((rounded[1:] != rounded[:-1]).any(axis=1)) + 1
    for first, last in pairwise([0, *changes.tolist(), len(rounded)]):
        top = 1.0
        for category in Category:
            part = float(parts[first, category])
            if part < THINNEST:
                continue
            top -= part
            drawn.append(
                f'<rect class="{category.key}" x="{first}" y="{max(top, 0.0) * HEIGHT:.3g}" '
                f'width="{last - first + 0.05}" height="{part * HEIGHT:.3g}"/>'
            )
    return "".join(drawn)


def _marks(timeline: Timeline, interruptions: Sequence[Interruption]) -> str:
    width = max(timeline.end - timeline.begin, 1e-9)
    groups: list[list[Interruption]] = []
    for one in interruptions:
        if groups and (one.time - groups[-1][0].time) / width < CROWDED:
            groups[-1].append(one)
        else:
            groups.append([one])
    marks = []
    for group in groups:
        first, last = group[0], group[-1]
        name = str(first.number) if first is last else f"{first.number}-{last.number}"
        kind = "failed" if any(one.kind.is_failure for one in group) else "asked"
        place = 100 * (first.time - timeline.begin) / width
        title = text("; ".join(one.cause for one in group[:5]))
        marks.append(
            f'<span class="mark {kind}" style="left:{place:.2f}%" title="{title}">{name}</span>'
        )
    return "".join(marks)


def _axis(width: float) -> str:
    step = next((t for t in _TICKS if width / t <= 7), None)
    if step is None:
        step = 86400 * int(np.ceil(width / 86400 / 7))
    ticks = [float(tick) for tick in np.arange(0, width, step) if tick / width < 0.93]
    words = {tick: duration(tick) if tick else "0" for tick in ticks}
    return "".join(
        f'<span style="left:{100 * tick / width:.2f}%">{words[tick]}</span>' for tick in ticks
    )
