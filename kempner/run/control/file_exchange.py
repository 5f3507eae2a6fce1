"""The control channel where no connection is possible: two files in the run's directory."""

from __future__ import annotations

from collections.abc import Iterator

from kempner.run.control.handshake import introduce
from kempner.run.control.launch_env import Launch
from kempner.run.control.outbox import Outbox
from kempner.run.control.protocol import FromSupervisor, decode_from_supervisor
from kempner.run.control.rank_reports import RankReports
from kempner.run.control.transport import MessageFile
from kempner.run.record.run_dir import RunDirectory

FILE_BEAT = 5.0
"""Seconds between two reports by file: a file system shared by thousands feels each of them."""


class FileExchange:
    """A rank's side: appends to a file of its own, and reads the supervisor's."""

    def __init__(self, launch: Launch, run: RunDirectory, rank: int) -> None:
        self._launch, self._rank = launch, rank
        number = launch.attempt.number
        self._own = MessageFile(run.messages(number, rank))
        self._theirs = MessageFile(run.messages(number, None))
        self._introduced = False

    def interrupt(self) -> None:
        """There is a connection again: the next exchange by file begins with an introduction."""
        self._introduced = False

    def exchange(
        self, reports: RankReports, outbox: Outbox, answered: bool
    ) -> Iterator[FromSupervisor]:
        """Write what there is to say, and read what came; both sides do so once in a while.

        What is written counts as heard as long as the supervisor has `answered` lately. Raises
        `OSError`, and `MessageError` for what is no message.
        """
        if not self._introduced:
            self._own.append(introduce(self._launch, self._rank, challenge=""))
            self._introduced = True
            reports.hurry()
        for report in reports.due(FILE_BEAT):
            self._own.append(report)
        for message in outbox.after(0) if answered else []:
            self._own.append(message)
            outbox.heard(message.number)
        for line in self._theirs.news():
            yield decode_from_supervisor(line)
