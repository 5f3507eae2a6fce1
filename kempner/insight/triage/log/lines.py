"""A line of a log, with its writer and time.

Launchers and libraries print these as prefixes of a line, often several in a row:
`3: [rank3]:[E321 02:07:08.4 ...] node7:4711:4712 [3] NCCL WARN ...`. Times have several forms, too.
"""

from __future__ import annotations

import calendar
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

_ISO = re.compile(
    r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _]"
    r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d+))?"
)
_GLOG = re.compile(
    r"\b[IWEF](?P<month>\d{1,2})(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)\.(?P<f>\d+)"
)

UNKNOWN_YEAR = 2000  # for times without a year in a log that names none
_LOOKED_AT = 400  # first characters of a line in which a time is searched


def time_of(text: str, year: int = UNKNOWN_YEAR) -> float | None:
    """Seconds since the epoch, as if the clock were UTC; None without a time. `year` is used for
    glog's form, which has none.
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


@dataclass(frozen=True)
class LogLine:
    """One line: `text` without the prefixes that say which process wrote it; those fields are None
    where there is no such prefix.

    `place` is `file:number`, `local_rank` counts within the node, `pid` is the writer's process
    there. A `warning`, or less, is no failure by itself.
    """

    place: str
    text: str
    time: float | None = None
    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    pid: int | None = None
    warning: bool = False

    @property
    def writer(self) -> tuple[int | None, int | None, str | None]:
        """A key of the writer, as far as it is known."""
        return self.rank, self.local_rank, self.node


_WRITERS = [
    re.compile(pattern)
    for pattern in (
        r"\[\d+,(?P<rank>\d+)\]<std(?:out|err)>:\s?",  # mpirun --tag-output
        r"\[[Rr]ank[: ]{0,2}(?P<rank>\d+)\]:?\s?",  # torch; Lightning
        r"[Rr]ank (?P<rank>\d+): ",
        r"\[(?:default|trainer|worker)(?P<local_rank>\d+)(?:\|\d+)?\]:\s?",  # torchrun --tee
        r"\(\w+ (?:rank=(?P<rank>\d+) )?pid=(?P<pid>\d+)(?:, ip=(?P<node>[\d.]+))?\)\s?",  # Ray
        r"\[(?P<rank>\d+)\] (?=\S+:\d+:\d+ \[\d+\])",  # mpiexec -prepend-rank, before NCCL
        r"(?P<node>[A-Za-z0-9][\w.-]*):(?P<pid>\d+):\d+ \[-?\d+\] (?=.*NCCL)",
        r"(?:stderr|stdout): ",
        r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[:,]?\s*",
    )
]
_LABEL = re.compile(r"\s*(?P<rank>\d+): ?")
_HOST = re.compile(r"(?P<node>[A-Za-z][\w-]*\d[\w.-]*|\d+(?:\.\d+){3}): ")
_BRACKETED_HOST = re.compile(
    r"\[(?!(?i:rank|default|trainer|worker|gpu|[ewif])[: ]?\d)"
    r"(?P<node>[A-Za-z][\w-]*\d[\w.-]*)\]:? ?"
)
_NOT_A_HOST = re.compile(
    r"(?i)(srun|slurmstepd|error|warning|info|step|epoch|(?:global_|local_)?rank|default|"
    r"trainer|worker|gpu|cuda|proc(?:ess)?|pid|task|[ew]\d*)\d*$"
)
_RANK_INSIDE = re.compile(r"\[(?:PG[^\]]*?)?\bRank (\d+)\]")
_WARNING = re.compile(r"\b\w*Warning\b|\bWARN(?:ING)?[\]:|]|\[[WID]\s?\d*[ \]]|^[WI]\d{4} ")
_LEVEL = re.compile(
    r"(?:^|[\s\[(|:])(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)(?=[\s\]):|-])"
    r"|\blevel(?:name)?\"?\s?[=:]\s?\"?(\w+)"
)
"""The level in a logger's line; the first near the front counts."""

_FRONT = 100  # first characters of a line in which a level is searched

_RANK_OF_FILE = re.compile(r"^(?:rank|task)[-_.]?(\d+)[._]")
_LOCAL_RANK_OF_FILE = re.compile(r"attempt_\d+/(\d+)/std(?:out|err)\.log$")  # torchrun --log-dir
_NODE_OF_FILE = re.compile(r"\d{3}[.-](?P<node>[a-z][\w-]*\d)\.(?:out|err|log)$")  # Slurm's %j.%N
SAMPLE = 200  # first lines of a file by which its prefixes are recognised


@dataclass
class _Style:
    """Facts about all lines of a file."""

    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    prefixes: list[re.Pattern[str]] = field(default_factory=lambda: list(_WRITERS))
    year: int = UNKNOWN_YEAR


class LogParser:
    """Parses the lines of one file, by its name and a sample of its first lines."""

    def __init__(self, source: str, sample: Sequence[str]) -> None:
        self._source = source
        self._style = _style(source, sample)

    def parse(self, number: int, text: str) -> Iterator[LogLine]:
        """The line with this number, followed by the lines of a traceback that it contains."""
        if text.startswith("{"):
            yield from _structured(LogLine(f"{self._source}:{number}", text), self._style)
        else:
            yield _parse(LogLine(f"{self._source}:{number}", text), self._style)


def _style(source: str, sample: Sequence[str]) -> _Style:
    name = PurePath(source).name
    rank, node = _RANK_OF_FILE.search(name), _NODE_OF_FILE.search(name)
    local = _LOCAL_RANK_OF_FILE.search(source)
    style = _Style(
        rank=int(rank[1]) if rank else None,
        local_rank=int(local[1]) if local else None,
        node=node["node"] if node else None,
    )
    lines = [line for line in sample if line]
    for prefix, share in ((_LABEL, 0.3), (_HOST, 0.5), (_BRACKETED_HOST, 0.5)):
        hits = [found for line in lines if (found := prefix.match(line))]
        hosts = set() if prefix is _LABEL else {found["node"] for found in hits}
        bare = (found for found in hits if not found.string.startswith("[rank", found.end()))
        if prefix is not _LABEL and any(_NOT_A_HOST.match(found["node"]) for found in bare):
            continue
        if len(hits) > 1 and len(hits) >= share * len(lines):
            style.prefixes.insert(0, prefix)
            if len(hosts) > 1:
                style.node = None  # the file has the output of several, whatever its name says
    return style


def _parse(line: LogLine, style: _Style) -> LogLine:
    fields: dict[str, str] = {}
    text = line.text
    if (dated := _ISO.search(text, 0, _LOOKED_AT)) is not None:
        style.year = int(dated["year"]) or style.year
    while (found := _prefix(text, style)) is not None:
        text = text[found.end() :]
        new = {k: v for k, v in found.groupdict().items() if v is not None}
        fields = {**new, **fields}
        if "rank" in new:  # the inner one is the program's; outside, a launcher counts its own way
            fields["rank"] = new["rank"]
    if "rank" not in fields and (inside := _RANK_INSIDE.search(text)):
        fields["rank"] = inside[1]
    return replace(
        line,
        text=text,
        time=time_of(line.text, style.year),
        rank=_number(fields.get("rank"), style.rank),
        local_rank=_number(fields.get("local_rank"), style.local_rank),
        node=fields.get("node") or style.node,
        pid=_number(fields.get("pid"), None),
        warning=_is_warning(text),
    )


def _is_warning(text: str) -> bool:
    level = _LEVEL.search(text, 0, _FRONT)
    if level is not None and "NCCL" not in text:
        return (level[1] or level[2]).upper() in ("DEBUG", "INFO", "WARN", "WARNING")
    return "NCCL INFO" in text or bool(_WARNING.search(text))


def _prefix(text: str, style: _Style) -> re.Match[str] | None:
    for prefix in style.prefixes:
        if (found := prefix.match(text)) and found.end():
            return found
    return None


def _number(digits: str | None, otherwise: int | None) -> int | None:
    return otherwise if digits is None else int(digits)


_HIDDEN = {"event", "level", "timestamp", "exception", "attempt", "pid", "rank", "node", "host"}


def _structured(line: LogLine, style: _Style) -> Iterator[LogLine]:
    """A line of a JSON log, as kempner and structlog write it; its traceback as lines below."""
    try:
        entry = json.loads(line.text)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        yield _parse(line, style)
        return
    rank, node = entry.get("rank"), entry.get("node") or entry.get("host")
    details = ", ".join(f"{key} {value}" for key, value in entry.items() if key not in _HIDDEN)
    head = LogLine(
        line.place,
        entry["event"] + (f" ({details})" if details else ""),
        time=time_of(str(entry.get("timestamp", "")), style.year),
        rank=rank if isinstance(rank, int) else style.rank,
        node=node if isinstance(node, str) else style.node,
        warning=str(entry.get("level", "info")) not in ("error", "critical"),
    )
    yield head
    for below in str(entry.get("exception", "")).splitlines():
        yield replace(head, text=below.rstrip(), warning=False)
