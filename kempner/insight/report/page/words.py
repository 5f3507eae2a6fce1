"""Durations, ratios and dates as text, for the report and `kempner status`; and text for HTML."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Self

UNKNOWN = "-"


def text(value: object) -> str:
    """Escape text of a run for HTML, and replace unprintable characters."""
    printable = "".join(
        c if c.isprintable() or c in " \n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )
    return escape(printable, quote=True)


def duration(seconds: float | None) -> str:
    """`3 h 12 min`: the two largest units that are not zero."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.2g} s"
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    size, name, below, lesser = next(unit for unit in units if whole >= unit[0])
    large, small = whole // size, whole % size // below
    return f"{large} {name}" + (f" {small} {lesser}" if small else "")


def share(part: float | None) -> str:
    """A ratio (0 to 1) in percent, with one decimal."""
    if part is None:
        return UNKNOWN
    percent = 100 * part
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f} %"


@dataclass(frozen=True)
class TimeUnit:
    """The unit for time on all ranks: its name, such as `GPU hours`, and how many are an hour."""

    name: str
    per_hour: float

    @classmethod
    def fit(cls, whole: float, counted: str) -> Self:
        sizes = (("hours", 1.0), ("minutes", 60.0))
        fitting = ((name, size) for name, size in sizes if whole * size >= 10)
        name, size = next(fitting, ("seconds", 3600.0))
        return cls(f"{counted} {name}", size)

    def show(self, hours: float) -> str:
        value = hours * self.per_hour
        if value == 0 or value >= 100:
            return f"{value:,.0f}"
        return f"{value:.3g}" if value >= 0.001 else "< 0.001"


def number(value: float | None, form: str = ",.0f") -> str:
    return UNKNOWN if value is None else format(value, form)


def date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
