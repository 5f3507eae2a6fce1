"""The supervisor's side of the control channel: the ranks of one attempt, by way of their agents.

What ranks are told reaches those that are there at once; a stop or a loss that concerns all of them
also those that join later.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from kempner.run.control.protocol import (
    Connected,
    Disconnected,
    FromSupervisor,
    News,
    RankMessage,
    RankNews,
    SummedReports,
    TellRanks,
    Usage,
)
from kempner.run.link.messages import Noted
from kempner.run.output.logs import logger
from kempner.supervisor.control.program_reports import LastReport, ProgramReports
from kempner.supervisor.policy.outcome import RankExit


class RankChannel:
    """Hears and talks to the `size` ranks of one attempt.

    `post` is called, from the thread that hears agents, with everything that the supervisor must
    act on; reports and usage are only kept, the newest of each rank. Other threads may read them.
    `send` sends to the agent of a node, or to all (None), also to those that come later if it
    stands. `program` knows what the files of a program tell that does not import kempner.
    """

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
        """Of each rank its process and the number of the last message that was taken in."""
        self._last_reports: dict[int, LastReport] = {}
        self._usage: dict[int, Usage] = {}

    def tell(self, message: FromSupervisor, rank: int | None = None) -> None:
        """Send to a rank, or to all; a stop or a loss also to those that connect later.

        May be called from any thread, and returns at once.
        """
        if rank is None or rank in self._nodes:
            node = None if rank is None else self._nodes[rank]
            self._send(TellRanks(self._attempt, message, rank), node)

    def last_reports(self) -> dict[int, LastReport]:
        """The newest report of every rank that has sent one."""
        of_program = {} if self._program is None else self._program.reports()
        return {**of_program, **self._last_reports}

    def interpret(self, end: RankExit, *, look: bool = False) -> RankExit:
        """What the end of a rank means that has not reported; `look` at what it has said last."""
        return end if self._program is None else self._program.interpret(end, look=look)

    def usage(self) -> dict[int, Usage]:
        """What every rank last said that it uses of its node."""
        return dict(self._usage)

    def hear(self, node: str, said: RankNews | SummedReports) -> None:
        """An agent passes on what its ranks say."""
        if said.attempt != self._attempt:
            return
        if isinstance(said, RankNews):
            self._take_in(node, said.news)
            return
        now = time.monotonic()
        self._last_reports |= {rank: LastReport(r, now) for rank, r in said.reports.items()}
        self._usage |= said.usage

    def cut_off(self, node: str, reason: str, hung_up: bool) -> None:
        """The link of an agent is over, and with it the connections of its ranks."""
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
                # Confirmed again if it was sent again: the answer was lost.
                self.tell(Noted(self._noted[rank][1]), rank)
                return
        self._post(news)
