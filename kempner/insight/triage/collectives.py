"""Who is missing in a collective that timed out: the rank that does not complain, or is behind."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kempner.insight.triage.ends import spread_out
from kempner.insight.triage.log.lines import LogLine

_TIMED_OUT = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+)")
_AT_WORK = re.compile(r"(?:at work|NCCL work): (\d+), last enqueued NCCL work: (-?\d+)")
_GLOO = re.compile(r"Timed out waiting \d+ ?ms for (?:send|recv) operation")
_SUBGROUP = re.compile(r"\[PG (?:ID )?(?P<id>[1-9]\d*)\b(?!.*default_pg)")
_DESYNC = re.compile(r"lagging/dead/mismatched ranks that caused the desync")
_LIST = re.compile(r"^\s*-\s*\[([\d, ]+)\]")


@dataclass(frozen=True)
class Missing:
    """The ranks that others waited for, and how that can be told."""

    ranks: tuple[int, ...]
    why: str


@dataclass
class Collectives:
    """Numbers of collectives, by rank: in which it timed out, and the last that it had begun."""

    stuck: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    complained: set[int] = field(default_factory=set)
    named: tuple[int, ...] = ()
    _desync: bool = False

    def learn(self, line: LogLine) -> None:
        """Take in a line of the watchdog or of Gloo."""
        text, rank = line.text, line.rank
        if self._desync and (found := _LIST.match(text)) is not None:
            self.named, self._desync = spread_out(found[1]), False
        elif _DESYNC.search(text):
            self._desync = True
        if rank is None:
            return
        timed_out, at_work = _TIMED_OUT.search(text), _AT_WORK.search(text)
        if timed_out or at_work or _GLOO.search(text):
            self.complained.add(rank)
        if _SUBGROUP.search(text):
            return
        if timed_out is not None:
            self.stuck.setdefault(rank, int(timed_out[1]))
        if at_work is not None:
            self.stuck.setdefault(rank, int(at_work[1]))
            self.begun[rank] = int(at_work[2])

    def missing(self, world: int | None) -> Missing | None:
        """Whom the others waited for; None if that cannot be told."""
        if self.named:
            return Missing(self.named, "torch's own report names it as the one behind")
        if silent := self._silent(world):
            return Missing(silent, "all others report the time-out")
        if behind := self._behind():
            furthest, at = max(self.stuck.values()), self._reached(behind[0])
            return Missing(behind, f"it had got to collective {at}, others wait in {furthest}")
        return None

    def _silent(self, world: int | None) -> tuple[int, ...]:
        """Those that do not complain, if most do. Where nobody says how many ranks there are, the
        log may lack whole nodes: then a single one among several counts."""
        if not self.complained:
            return ()
        size = min(world or max(self.complained) + 1, 100_000)
        silent = tuple(rank for rank in range(size) if rank not in self.complained)
        most = len(self.complained) - 1 if world else 1
        return silent if len(silent) <= most and len(self.complained) > 2 else ()

    def _behind(self) -> tuple[int, ...]:
        """Those that had not begun what others wait in."""
        furthest = max(self.stuck.values(), default=0)
        behind = tuple(sorted(r for r in self.stuck if self._reached(r) < furthest))
        return behind if 2 * len(behind) <= len(self.stuck) else ()

    def _reached(self, rank: int) -> int:
        return self.begun.get(rank, self.stuck[rank])
