"""When a line was written, by any of the forms in which programs around a training job say it."""

from __future__ import annotations

import calendar
import re

_ISO = re.compile(
    r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _]"
    r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d+))?"
)
_GLOG = re.compile(
    r"\b[IWEF](?P<month>\d{1,2})(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)\.(?P<f>\d+)"
)

UNKNOWN_YEAR = 2000
"""For forms without a year in a log where nothing else names one."""

_LOOKED_AT = 400
"""Characters of a line in which a time is looked for; it stands near the front."""


def time_of(text: str, year: int = UNKNOWN_YEAR) -> float | None:
    """Seconds since the epoch, as if the clock were UTC; None if the line does not say.

    Good for comparing lines of one log. `year` counts for glog's form, which leaves it out.
    """
    found = _ISO.search(text, 0, _LOOKED_AT) or _GLOG.search(text, 0, _LOOKED_AT)
    if found is None:
        return None
    part = found.groupdict()
    date = (int(part.get("year") or year), int(part["month"]), int(part["day"]))
    if not (1 <= date[1] <= 12 and 1 <= date[2] <= 31):
        return None
    clock = (int(part["h"]), int(part["m"]), int(part["s"]))
    fraction = float(f"0.{part['f']}") if part["f"] else 0.0
    return calendar.timegm((*date, *clock)) + fraction


def year_of(text: str) -> int | None:
    """The year that a line names with a full date."""
    found = _ISO.search(text, 0, _LOOKED_AT)
    return int(found["year"]) if found else None
