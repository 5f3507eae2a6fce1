"""The ranks of one attempt in the supervisor: its side of the control channel, through their agents
(`RankChannel`); which have joined, disconnected or ended (`RankRoster`); their status for `kempner
status`, and the terminal's line until they train (`StartProgress`)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import psutil

from kempner.run.control.heartbeat import describe_places
from kempner.run.control.protocol import (
    Connected,
    Disconnected,
    FromSupervisor,
    News,
    Phase,
    RankMessage,
    RankNews,
    SummedReports,
    TellRanks,
    Usage,
)
from kempner.run.link.messages import Noted
from kempner.run.output.console import (
    WholeLine,
    can_rewrite,
    erase_line,
    leave_line_to_others,
    show_for_now,
)
from kempner.run.output.logs import logger, warn
from kempner.run.output.units import count
from kempner.run.output.writers import LatestContent
from kempner.run.process.exit_codes import LEFT_EARLY
from kempner.supervisor.control.program_reports import LastReport, ProgramReports
from kempner.supervisor.policy.outcome import RankExit, failed, is_lost


class RankChannel:
    """Exchanges messages with the `size` ranks of one attempt.

    `post` is called, from the agents' thread, with everything that the supervisor must act on; of
    reports and usage only the newest of each rank is kept, which other threads may read. `send`
    sends to the agent of a node, or to all (None), and a message that stands also to agents that
    connect later. `program` reads the heartbeat files of a program that does not use kempner."""

    def __init__(
        self,
        attempt: int,
        size: int,
        post: Callable[[News], None],
        send: Callable[[TellRanks, str | None], None],
        program: ProgramReports | None = None,
    ) -> None:
        self._attempt, self._size, self._program = attempt, size, program
        self._post, self._send = post, send
        self._nodes: dict[int, str] = {}
        self._there: defaultdict[str, set[int]] = defaultdict(set)
        """The ranks that are connected, by node."""
        self._noted: dict[int, tuple[int, int]] = {}
        """Each rank's process id, and the number of its last message that was handled."""
        self._last_reports: dict[int, LastReport] = {}
        self.usage: Mapping[int, Usage] = {}
        """The last resource usage that each rank reported."""

    def tell(self, message: FromSupervisor, rank: int | None = None) -> None:
        """Send to a rank, or to all; a message that stands (a stop, a lost peer) also to ranks that
        connect later. From any thread; returns at once."""
        if rank is None or rank in self._nodes:
            node = None if rank is None else self._nodes[rank]
            self._send(TellRanks(self._attempt, message, rank), node)

    def last_reports(self) -> dict[int, LastReport]:
        """The newest report of each rank."""
        of_program = {} if self._program is None else self._program.reports()
        return {**of_program, **self._last_reports}

    def interpret(self, end: RankExit, *, look: bool = False) -> RankExit:
        """The meaning of a rank's end, if the program does not use kempner; `look`: read its files
        again."""
        return end if self._program is None else self._program.interpret(end, look=look)

    def hear(self, node: str, passed_on: RankNews | SummedReports) -> None:
        """Handle what an agent passes on from its ranks."""
        if passed_on.attempt != self._attempt:
            return
        if isinstance(passed_on, RankNews):
            self._take_in(node, passed_on.news)
            return
        now = time.monotonic()
        self._last_reports |= {rank: LastReport(r, now) for rank, r in passed_on.reports.items()}
        self.usage = {**self.usage, **passed_on.usage}

    def cut_off(self, node: str, reason: str, hung_up: bool) -> None:
        """The link of an agent broke, and with it the connections of its ranks."""
        for rank in sorted(self._there.pop(node, ())):
            self._post(Disconnected(rank, reason, hung_up))

    def _take_in(self, node: str, news: News) -> None:
        rank = news.rank
        match news:
            case Connected() if rank >= self._size:
                logger().warning("not a rank of this attempt", rank=rank, node=node)
                return
            case Connected():
                self._nodes[rank] = node
                self._there[node].add(rank)
                if self._noted.get(rank, (-1, 0))[0] != news.pid:
                    self._noted[rank] = (news.pid, 0)
            case Disconnected():
                if rank not in self._there[node]:
                    return
                self._there[node].discard(rank)
            case RankMessage(message=message):
                if rank not in self._noted:
                    return
                pid, heard = self._noted[rank]
                if message.number > heard:
                    self._noted[rank] = (pid, message.number)
                    self._post(news)
                # Acknowledged again if it was sent again: the first acknowledgement was lost.
                self.tell(Noted(self._noted[rank][1]), rank)
                return
        self._post(news)


RECONNECT = 3.0
"""Seconds for a rank that has hung up to reconnect before it counts as lost. Its process has ended,
or retries after 0.1 s. Counted from the last step at the earliest: while steps are made, all ranks
are alive."""

AWAY = 60.0
"""Seconds without a message after which a rank whose connection broke in any other way counts as
lost. A network that reconfigures itself (spanning tree, a booting switch) is down for half a
minute, both kernels drop the connection within `UNACKNOWLEDGED`, and connecting takes seconds; a
restart would cost more."""

JOIN = 120.0
"""Seconds after the last rank joined within which a missing rank must join, or it counts as lost:
srun does not report that one of its tasks has ended. A rank joins before it imports torch."""


class _BrokenConnection(NamedTuple):
    """When a connection broke, and whether the rank's side closed it."""

    at: float
    hung_up: bool


class RankRoster:
    """Which of the `size` ranks of an attempt have joined, disconnected and ended. Without
    `must_report` (a user's program) they need not join. Times are seconds of the attempt's clock.
    """

    def __init__(self, size: int, must_report: bool = True) -> None:
        self.size, self.must_report = size, must_report
        self.joined: dict[int, Connected] = {}
        self.stuck: dict[int, Connected] = {}
        """The ranks that could not be killed."""
        self._joined_at = 0.0
        self._broken: dict[int, _BrokenConnection] = {}
        self._heard: dict[int, tuple[float, float]] = {}
        """The time stamp of each rank's newest report, and when it was noticed here."""
        self._reached, self._reached_at = 0, 0.0
        self._ends: dict[int, tuple[float, RankExit]] = {}
        self._ended_at = 0.0
        self.ends: list[RankExit] = []
        """The ends of ranks, in the order of their first sign."""
        self.first_ended_at: float | None = None
        self.any_failed = False
        """Whether a rank has failed, so that the others cannot go on."""

    @property
    def all_joined(self) -> bool:
        """Whether every rank has connected at least once."""
        return len(self.joined) == self.size

    def connected(self, there: Connected, now: float) -> None:
        """A rank has connected or reconnected."""
        self._broken.pop(there.rank, None)
        self._heard[there.rank] = (0.0, now)
        self.joined[there.rank] = there
        self._joined_at = now

    def disconnected(self, gone: Disconnected, now: float) -> None:
        """A rank's connection broke; ignored if the rank has ended."""
        if gone.rank not in self._ends:
            self._broken[gone.rank] = _BrokenConnection(now, gone.hung_up)

    def ended(self, end: RankExit, now: float) -> bool:
        """A rank has ended; False if that was known. The first report counts: the rank's own says
        more than its exit status, which comes later."""
        if end.rank in self._ends:
            return False
        self._ended_at, self.any_failed = now, self.any_failed or failed(end)
        broken = self._broken.pop(end.rank, None)
        self._ends[end.rank] = (now if broken is None else broken.at, end)
        in_order = sorted(self._ends.values(), key=itemgetter(0))
        self.ends, self.first_ended_at = [each for _, each in in_order], in_order[0][0]
        return True

    def left_early(self, end: RankExit) -> bool:
        """Whether a stopped rank had not begun to train, so that no rank can have begun."""
        return self.must_report and (
            end.rank not in self.joined or end.sentence.startswith(LEFT_EARLY)
        )

    def missing(
        self, last_reports: Mapping[int, LastReport], now: float, all_are_due: bool
    ) -> list[RankExit]:
        """The ends of ranks that count as lost: their connection broke too long ago or, if
        `all_are_due`, they have not joined long after the others."""
        step = max((last.report.step for last in last_reports.values()), default=0)
        if step > self._reached:
            self._reached, self._reached_at = step, now
        for rank, last in last_reports.items():
            if self._heard.get(rank, (0.0, now))[0] != last.at:
                self._heard[rank] = (last.at, now)
        lost = []
        for rank, broken in self._broken.items():
            if now - max(broken.at, self._reached_at) <= RECONNECT:
                continue
            _, heard_at = self._heard.get(rank, (0.0, broken.at))
            # After a failure, perhaps caused by this loss, waiting saves nothing.
            at_once = broken.hung_up or self.any_failed
            if at_once or now - max(heard_at, self._reached_at) > AWAY:
                lost.append(RankExit(rank, None))
        late = self.must_report and bool(self.joined) and now - self._joined_at > JOIN
        if all_are_due and late:
            missing = sorted(set(range(self.size)) - self.joined.keys())
            lost += [RankExit(rank, None, sentence="it has never joined") for rank in missing]
        return lost

    def not_ended(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self._ends]

    def survivors(self) -> dict[int, Connected]:
        """Those of them that are connected: the kernel closes a connection when the process
        ends."""
        there = (rank for rank in self.not_ended() if rank not in self._broken)
        return {rank: self.joined[rank] for rank in there if rank in self.joined}

    def ended_for(self, now: float) -> float | None:
        """Seconds since the last rank has ended; None if some have not."""
        return now - self._ended_at if len(self._ends) == self.size else None

    def host_of(self, rank: int | None) -> str:
        """The host of a rank; empty if it never joined."""
        return self.joined[rank].host if rank in self.joined else ""

    def stuck_pids(self) -> dict[str, list[int]]:
        """The process ids of the ranks that could not be killed, by host."""
        found: dict[str, list[int]] = {}
        for there in self.stuck.values():
            found.setdefault(there.host, []).append(there.pid)
        return found

    def lost_hosts(self) -> list[str]:
        """The hosts of ranks whose end was not seen: the machines may be lost, too."""
        lost = (end.rank for end in self.ends if is_lost(end))
        return sorted({self.joined[rank].host for rank in lost if rank in self.joined})


STATUS_EVERY = 2.0
"""Seconds between two writes of the status file."""


class RankStatusFile:
    """Keeps the ranks' status file up to date; a failed write never ends the run."""

    def __init__(self, path: Path) -> None:
        self._file = LatestContent(path, warn)
        self._written: Mapping[int, LastReport] = {}
        self._due_at = 0.0

    def update(self, seen: Mapping[int, LastReport], *, now: bool = False) -> None:
        """Write the reports if they have changed and it is time, or `now`."""
        if seen == self._written or (time.monotonic() < self._due_at and not now):
            return
        self._due_at = time.monotonic() + STATUS_EVERY
        self._file.replace(describe_places({rank: last.report for rank, last in seen.items()}))
        self._written = seen


_ON_THE_WAY = (Phase.START, Phase.RENDEZVOUS, Phase.LOAD)
"""The phases before the first step, in their order."""

_PROBE = 4
"""Bytes that Python's tempfile writes once to test a folder."""

_NEW_LINES = 3
"""The most new lines below the output of a user's program before it trains."""

_LONGEST = 60
"""Seconds after which the start of a user's program is no longer shown."""


def describe_start(size: int, phases: Collection[Phase], last_step: int | None) -> str:
    """A line about the start of `size` ranks; empty once one of them trains. `phases` are those of
    the connected ranks, `last_step` the newest commit."""
    if any(phase not in _ON_THE_WAY for phase in phases):
        return ""
    ranks = count(size, "rank")
    if len(phases) < size:  # a fork server imports torch for all of them first
        return f"starting {ranks}: importing torch"
    match min(phases, key=_ON_THE_WAY.index):
        case Phase.START:
            return f"{ranks}: importing torch"
        case Phase.RENDEZVOUS:
            return f"{ranks}: meeting"
        case _:
            doing = "building the model" if last_step is None else f"loading step {last_step}"
            return f"{ranks}: {doing}"


def written_below() -> int | None:
    """Bytes that the descendants of this process have written to any file; None if unknown."""
    total = 0
    try:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                total += max(0, process.io_counters().write_chars - _PROBE)
    except (psutil.Error, OSError):  # another user's, or no descriptor is free
        return None
    return total


class StartProgress:
    """Shows the start of the ranks: on a terminal one line that is rewritten, with the seconds
    since the start; in a file a line per phase; nothing once training has begun.

    A user's program may print anything, so its line is rewritten only while none of its processes
    has written anything."""

    def __init__(
        self,
        size: int,
        last_step: int | None,
        ours: bool,
        now: Callable[[], float] = time.monotonic,
        written: Callable[[], int | None] = written_below,
    ) -> None:
        self._size, self._last_step, self._now, self._written = size, last_step, now, written
        self._shown, self._over, self._began = "", False, now()
        self._head, self._left = f"starting {count(size, 'rank')}", _NEW_LINES
        self._seen, self._before = (
            0,
            0,
        )  # bytes written when the line was shown, and at the last look
        self._whole_line = None if ours else WholeLine(self._head)
        if ours:
            self.update(())

    def update(self, phases: Collection[Phase]) -> None:
        if self._over:
            return
        if self._whole_line is not None:
            self._whole_line = self._say_whole(self._whole_line, phases)
            return
        line = describe_start(self._size, phases, self._last_step)
        if not line:
            self._over = True
            leave_line_to_others(True)  # rank 0 shows its own line there
            return
        seconds = int(self._now() - self._began)
        if seconds and can_rewrite():
            line = f"{line}, {seconds} s"
        if line != self._shown:
            self._shown = line
            show_for_now(line)

    def _say_whole(self, line: WholeLine, phases: Collection[Phase]) -> WholeLine:
        """Show the progress of a user's program in the place of `line`, or below it if something
        may have been printed since."""
        head, seconds = self._head, int(self._now() - self._began)
        if len(phases) >= self._size:
            head = describe_start(self._size, phases, self._last_step)
        if not head or seconds > _LONGEST or not can_rewrite():
            self._over = True
            return line
        if (written := self._written()) is None:
            self._over = True
            return line
        text = f"{head}, {seconds} s"
        pauses, self._before = written == self._before, written
        if not seconds or text == self._shown:
            return line
        if written == self._seen:
            self._over = not line.say_anew(text)
        elif head != self._head or (pauses and self._left):
            self._left -= head == self._head
            line = WholeLine(text)
        else:  # the program prints
            return line
        self._head, self._seen, self._shown = head, written, text
        return line

    def close(self, clean: bool) -> None:
        """Clean up the line after the last rank has ended; `clean`: rank 0 has closed its own."""
        if self._whole_line is not None:
            return
        if not self._over:
            self._over = True
            erase_line()
        elif clean:
            leave_line_to_others(False)
