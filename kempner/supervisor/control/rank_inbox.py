"""What the ranks of an attempt have said, over whatever way it came."""

from __future__ import annotations

import time
from collections.abc import Callable

from kempner.run.control.protocol import FromRank, Hello, MessageError, Report, Usage
from kempner.supervisor.control.events import LastReport, News, RankMessage


class RankInbox:
    """Keeps the newest report and usage of each rank, and hands the rest on to `post`, once.

    Written by one thread; the others may read `last_reports` and `usage`.
    """

    def __init__(self, post: Callable[[News], None]) -> None:
        self.post = post
        self._last_reports: dict[int, LastReport] = {}
        self._usage: dict[int, Usage] = {}
        self._noted: dict[int, int] = {}

    def last_reports(self) -> dict[int, LastReport]:
        """The newest report of every rank that has sent one."""
        return dict(self._last_reports)

    def usage(self) -> dict[int, Usage]:
        """What every rank last said that it uses of its node."""
        return dict(self._usage)

    def noted(self, rank: int) -> int:
        """The number of the last message of a rank that was handed on; 0 before the first."""
        return self._noted.get(rank, 0)

    def take_in(self, rank: int, message: FromRank) -> None:
        """A rank that is known has said something; raises `MessageError` if it makes no sense."""
        if isinstance(message, Report):
            self._last_reports[rank] = LastReport(message, time.monotonic())
        elif isinstance(message, Usage):
            self._usage[rank] = message
        elif isinstance(message, Hello):
            raise MessageError("it says hello twice")
        elif message.number > self.noted(rank):  # not one that is sent again
            self._noted[rank] = message.number
            self.post(RankMessage(rank, message))
