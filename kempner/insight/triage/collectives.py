"""Who is missing in a collective that timed out: the rank that does not complain, or is behind."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kempner.insight.triage.ends import spread_out
from kempner.insight.triage.log.lines import LogLine

_TIMED_OUT = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+)")
_AT_WORK = re.compile(r"(?:at work|NCCL work): \d+, last enqueued NCCL work: (-?\d+)")
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
    """How far each rank has got that says so: the number of the collective it is in."""

    reached: dict[int, int] = field(default_factory=dict)
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
        if _GLOO.search(text):
            self.complained.add(rank)
        elif (found := _TIMED_OUT.search(text)) is not None:
            self.complained.add(rank)
            if rank not in self.reached and not _SUBGROUP.search(text):
                self.reached[rank] = int(found[1])
        elif (found := _AT_WORK.search(text)) is not None and not _SUBGROUP.search(text):
            self.complained.add(rank)
            self.reached[rank] = int(found[1])

    def missing(self, world: int | None) -> Missing | None:
        """Whom the others waited for; None if that cannot be told."""
        if self.named:
            return Missing(self.named, "torch's own report names it as the one behind")
        behind = self._behind()
        silent = self._silent(world)
        if silent:
            return Missing(silent, "all others report the time-out, it does not")
        if behind:
            furthest = max(self.reached.values())
            at = self.reached[behind[0]]
            return Missing(behind, f"it had got to collective {at}, others to {furthest}")
        return None

    def _silent(self, world: int | None) -> tuple[int, ...]:
        if not self.complained:
            return ()
        size = world or max(self.complained) + 1
        silent = tuple(rank for rank in range(min(size, 100_000)) if rank not in self.complained)
        return silent if len(silent) < len(self.complained) else ()

    def _behind(self) -> tuple[int, ...]:
        if len(set(self.reached.values())) < 2:
            return ()
        least = min(self.reached.values())
        behind = tuple(sorted(r for r, at in self.reached.items() if at == least))
        return behind if 2 * len(behind) < len(self.reached) + 1 else ()
