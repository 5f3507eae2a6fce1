"""The timeline: what the run did at each moment of its wall time, as SVG without any script."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kempner.insight.report.categories import Category
from kempner.insight.report.interruptions import Interruption
from kempner.insight.report.page.words import duration, text
from kempner.insight.report.timeline import Timeline

COLUMNS, HEIGHT = 400, 100
"""A column is so much of the wall time that it goes into the width; in it the categories stand on
each other, by their shares. Nothing is left out, however short."""

LEAST = 0.004
"""The share of a column, or of the wall time, below which nothing could be seen."""

CROWDED = 0.022
"""Marks that are nearer to each other, as a share of the width, become one."""

_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def strip(timeline: Timeline, interruptions: Sequence[Interruption]) -> str:
    """The timeline with its marks and its axis, as HTML."""
    bounds = np.linspace(timeline.begin, timeline.end, COLUMNS + 1)
    width = max(timeline.end - timeline.begin, 1e-9)
    parts = timeline.pieces.shares(bounds) / (width / COLUMNS)
    parts[:, Category.UNACCOUNTED] += np.clip(1 - parts.sum(axis=1), 0, None)
    said = "; ".join(
        f"{category.label} {duration(float(seconds))}"
        for category, seconds in zip(Category, timeline.seconds(), strict=True)
        if seconds >= 0.05
    )
    drawing = (
        f'<svg viewBox="0 0 {COLUMNS} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(said)}">{_rectangles(parts)}</svg>'
    )
    return (
        f'<div class="strip"><div class="marks">{_marks(timeline, interruptions)}</div>'
        f'{drawing}<div class="axis">{_axis(width)}</div>'
        f"{_legend(interruptions, width)}</div>"
    )


def _legend(interruptions: Sequence[Interruption], width: float) -> str:
    """What the marks mean that there are, and what the height of a colour says."""
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
    """Columns that look the same become one rectangle per category."""
    rounded = np.round(parts, 2)
    drawn = []
    for first, last in _runs(rounded):
        top = 1.0
        for category in Category:
            part = float(parts[first, category])
            if part < LEAST:
                continue
            top -= part
            drawn.append(
                f'<rect class="{category.key}" x="{first}" y="{max(top, 0.0) * HEIGHT:.3g}" '
                f'width="{last - first + 0.05}" height="{part * HEIGHT:.3g}"/>'
            )
    return "".join(drawn)


def _runs(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> list[tuple[int, int]]:
    """First row, and the one after the last, of rows that are equal."""
    changes = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
    edges = [0, *changes.tolist(), len(rows)]
    return list(pairwise(edges))


def _marks(timeline: Timeline, interruptions: Sequence[Interruption]) -> str:
    """The numbers of the interruptions, above where they happened."""
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
    """A handful of times since the begin."""
    step = next((t for t in _TICKS if width / t <= 7), None)
    if step is None:
        step = 86400 * int(np.ceil(width / 86400 / 7))
    ticks = [float(tick) for tick in np.arange(0, width, step) if tick / width < 0.93]
    words = {tick: duration(tick) if tick else "0" for tick in ticks}
    return "".join(
        f'<span style="left:{100 * tick / width:.2f}%">{words[tick]}</span>' for tick in ticks
    )
