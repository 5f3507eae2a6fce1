"""Exits of processes, as launchers and the accounting report them.

srun names node and task; torchrun prints a block per process; sacct has `code:signal`; a shell adds
128 to a signal's number.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field, replace

from kempner.insight.triage.log.lines import LogLine, time_of
from kempner.insight.triage.rules import SignLevel, Sure

_SRUN = re.compile(
    r"srun: error: (?P<node>[\w.-]+): tasks? (?P<ranks>[\d,-]+): (?P<how>[A-Z][^\n]*)"
)
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_WORDS = {
    "Killed": -9,
    "Terminated": -15,
    "Segmentation fault": -11,
    "Aborted": -6,
    "Bus error": -7,
    "Illegal instruction": -4,
    "Floating point exception": -8,
    "Interrupt": -2,
}
_FAILED = re.compile(
    r"failed \(exitcode: (?P<status>-?\d+)\) local_rank: (?P<local_rank>\d+) \(pid: (?P<pid>\d+)\)"
)
_LAUNCHER = re.compile(r"torch[./]distributed[./](?:elastic|launch|run)\b|\[launch\.py:\d+:")
_FIELD = re.compile(r"\s*(?P<name>time|host|rank|exitcode)\s*: (?P<said>.*)$")
_LIGHTNING = re.compile(
    r"Child process with PID (?P<pid>\d+) terminated with code (?P<status>-?\d+)"
)
_MPIRUN = re.compile(
    r"noticed that process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<node>\S+) "
    r"exited on signal (?P<signal>\d+)"
)
_SPAWNED = re.compile(
    r"process (?P<rank>\d+) terminated with (?:signal (?P<name>SIG\w+)|exit code (?P<status>\d+))"
)
_DEEPSPEED = re.compile(r"exits with return code = (?P<status>-?\d+)")
_SACCT = re.compile(
    r"^\s*\d+(?:_\d+)?(?:\.\w+)?\+?[\s|].*?\b(?P<state>COMPLETED|FAILED|TIMEOUT|DEADLINE|CANCELLED"
    r"(?: by \d+)?|NODE_FAIL|PREEMPTED|OUT_OF_ME\w*|BOOT_FAIL|REQUEUED)\b"
)
_STATUS = re.compile(r"(?<![:\d-])(\d+):(\d+)(?![:\d])")

_STATES = {
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "NODE_FAIL": "node_failure",
    "PREEMPTED": "preemption",
    "BOOT_FAIL": "node_failure",
    "REQUEUED": "requeued",
}


@dataclass(frozen=True)
class End:
    """The exit of processes: `status` is an exit code, or minus a signal's number.

    `cause` is the name of a row of the table. `first`: torchrun saw it fail first on its node.
    `task`: its `ranks` are tasks of srun.
    """

    line: LogLine
    status: int | None
    cause: str
    level: SignLevel
    sure: Sure = Sure.LIKELY
    ranks: tuple[int, ...] = ()
    node: str | None = None
    first: bool = False
    task: bool = False


_BY_STATUS: dict[int, tuple[str, SignLevel, Sure]] = {
    -9: ("killed", SignLevel.MECHANISM, Sure.LIKELY),
    -11: ("segfault", SignLevel.MECHANISM, Sure.CERTAIN),
    -7: ("bus_error", SignLevel.MECHANISM, Sure.CERTAIN),
    -4: ("illegal_instruction", SignLevel.MECHANISM, Sure.CERTAIN),
    -8: ("arithmetic_trap", SignLevel.MECHANISM, Sure.CERTAIN),
    -2: ("interrupted", SignLevel.MECHANISM, Sure.LIKELY),
    -6: ("aborted", SignLevel.SYMPTOM, Sure.POSSIBLE),
    -15: ("terminated", SignLevel.CASCADE, Sure.POSSIBLE),
    -125: ("host_out_of_memory", SignLevel.GIVEN, Sure.CERTAIN),
}


def plain_status(code: int) -> int:
    """A shell's exit code, with a signal as minus its number."""
    return 128 - code if 128 < code < 160 else code


def describe_status(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"{signal.Signals(-status).name} ({-status})"
    except ValueError:
        return f"signal {-status}"


def what_status_means(status: int) -> tuple[str, SignLevel, Sure]:
    """The name of the table's row for a failing exit status, its level, and its certainty."""
    return _BY_STATUS.get(status, ("exit_code", SignLevel.SYMPTOM, Sure.POSSIBLE))


def expand_ranks(ranks: str) -> tuple[int, ...]:
    """Slurm's or torch's list of ranks, `0-2,5`: at most 4096 of them."""
    found: list[int] = []
    for part in re.split(r"[, ]+", ranks.strip(" ,")):
        low, _, high = part.partition("-")
        if low.isdigit():
            found += range(int(low), min(int(high or low), int(low) + 4096) + 1)
    return tuple(found)


@dataclass
class EndReader:
    """Finds exits in lines, also in the blocks that torchrun prints over several lines."""

    elastic: bool = False
    """Whether torchrun, or a similar launcher, starts the ranks: then srun's tasks are no ranks."""
    _blocks: dict[object, dict[str, str]] = field(default_factory=dict)
    _root: set[object] = field(default_factory=set)
    _ending: bool = False
    """Whether Slurm already ends the step: exits by its signals are consequences."""

    def feed(self, line: LogLine) -> End | None:
        text = line.text
        if "srun: " in text:
            return self._srun(line)
        self.elastic = self.elastic or _LAUNCHER.search(text) is not None
        if (found := _FAILED.search(text)) is not None:
            return _end(line, int(found["status"]), node=line.node, pid=int(found["pid"]))
        if (found := _LIGHTNING.search(text) or _DEEPSPEED.search(text)) is not None:
            ranks = () if line.rank is None else (line.rank,)
            return _end(line, int(found["status"]), ranks=ranks)
        if (found := _MPIRUN.search(text)) is not None:
            ranks, pid = (int(found["rank"]),), int(found["pid"])
            return _end(line, -int(found["signal"]), found["node"], ranks, pid)
        if (found := _SPAWNED.search(text)) is not None and (status := _spawned(found)) is not None:
            return _end(line, status, ranks=(int(found["rank"]),))
        if (found := _SACCT.search(text)) is not None:
            return _accounted(line, found["state"])
        if "Root Cause (first observed failure)" in text:
            self._root.add(line.writer)
        elif text.strip() in ("Failures:", "Other Failures:"):
            self._root.discard(line.writer)
        elif (found := _FIELD.match(text)) is not None:
            return self._torchrun(line, found["name"], found["said"])
        return None

    def _srun(self, line: LogLine) -> End | None:
        found = _SRUN.search(line.text)
        if found is None:
            self._ending |= "Terminating" in line.text or "Job step aborted" in line.text
            return None
        exited = _EXIT_CODE.match(found["how"])
        statuses = [number for words, number in _WORDS.items() if found["how"].startswith(words)]
        if not (exited or statuses):
            return None
        status = plain_status(int(exited[1])) if exited else statuses[0]
        ranks = () if self.elastic else expand_ranks(found["ranks"])
        end = replace(_end(line, status, node=found["node"], ranks=ranks), task=bool(ranks))
        killed = self._ending and status in (-9, -15)
        return replace(end, level=SignLevel.CASCADE) if killed else end

    def _torchrun(self, line: LogLine, name: str, value: str) -> End | None:
        block = self._blocks.setdefault(line.writer, {})
        block[name] = value
        if name != "exitcode" or "rank" not in block:
            return None
        del self._blocks[line.writer]
        rank, status = re.match(r"(\d+)", block["rank"]), re.match(r"(-?\d+)", value)
        if rank is None or status is None:
            return None
        when = time_of(block.get("time", "")) or line.time
        local = re.search(r"local_rank: (\d+)", block["rank"])
        pid = re.search(r"pid: (\d+)", value)
        return _end(
            replace(line, time=when, local_rank=int(local[1]) if local else line.local_rank),
            int(status[1]),
            node=block.get("host"),
            ranks=(int(rank[1]),),
            pid=int(pid[1]) if pid else None,
            first=line.writer in self._root,
        )


def _end(
    line: LogLine,
    status: int,
    node: str | None = None,
    ranks: tuple[int, ...] = (),
    pid: int | None = None,
    first: bool = False,
) -> End:
    cause, level, sure = what_status_means(status)
    who = replace(line, pid=pid if pid is not None else line.pid)
    return End(who, status, cause, level, sure, ranks, node, first)


def _spawned(found: re.Match[str]) -> int | None:
    if found["status"] is not None:
        return int(found["status"])
    number = getattr(signal, found["name"], None)
    return None if number is None else -int(number)


def _accounted(line: LogLine, state: str) -> End | None:
    status = _STATUS.search(line.text)
    code, number = (int(status[1]), int(status[2])) if status else (0, 0)
    if state == "COMPLETED":
        return None
    if state.startswith("OUT_OF_ME") or number == 125:
        return End(line, None, "host_out_of_memory", SignLevel.GIVEN, Sure.CERTAIN)
    if state in _STATES:
        name = _STATES[state]
        level = SignLevel.GIVEN if name == "node_failure" else SignLevel.CAUSE
        return End(line, None, name, level, Sure.CERTAIN)
    if state.startswith("CANCELLED"):
        by_whom = "by" in state
        level, sure = (SignLevel.CAUSE if by_whom else SignLevel.SYMPTOM), Sure.LIKELY
        return End(line, None, "cancelled", level, Sure.CERTAIN if by_whom else sure)
    return _end(line, -number if number else plain_status(code)) if code or number else None
