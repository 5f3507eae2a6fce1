"""The control channel through files in the attempt's folder, where ranks cannot connect.

A firewall between the nodes of a job must not make a run unwatchable. Each rank appends its
messages to a file of its own and reads the supervisor's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kempner.run.control.protocol import FromRank, FromSupervisor, MessageError, decode_from_rank
from kempner.run.control.transport import MessageFile
from kempner.run.output.logs import logger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.events import LastReport
from kempner.supervisor.control.program_reports import ProgramReports
from kempner.supervisor.policy.outcome import RankExit


class FileTransport:
    """Reads the files of the ranks of one attempt, and writes the supervisor's.

    What is written there, all ranks that use it read: a message to one of them reaches the others,
    too. Nothing is written as long as no rank has asked for it.
    """

    def __init__(
        self, run: RunDirectory, attempt: int, size: int, program: ProgramReports | None = None
    ) -> None:
        self._program = program
        self._folder = run.attempt(attempt)
        self._paths = {run.messages(attempt, rank).name: rank for rank in range(size)}
        self._files: dict[int, MessageFile] = {}
        self._own = MessageFile(run.messages(attempt, None))
        self.admitted: set[int] = set()
        self._blind = False

    def reports(self) -> Mapping[int, LastReport]:
        """What the files of a program tell that does not import kempner."""
        return {} if self._program is None else self._program.reports()

    def interpret(self, end: RankExit, look: bool) -> RankExit:
        """What the end of a rank of such a program means."""
        return end if self._program is None else self._program.interpret(end, look=look)

    def admit(self, rank: int, orders: Iterable[FromSupervisor]) -> None:
        """A rank is reached by file from now on; `orders` are what it must know."""
        self.admitted.add(rank)
        for message in orders:
            self.tell(message)

    def leave(self, rank: int) -> None:
        """A rank is connected now."""
        self.admitted.discard(rank)

    def tell(self, message: FromSupervisor) -> None:
        """Write, if any rank listens."""
        if not self.admitted:
            return
        try:
            self._own.append(message)
        except OSError as error:
            logger().warning("cannot write messages to the ranks", error=error.strerror)

    def news(self) -> Iterator[tuple[int, FromRank]]:
        """What ranks have written since the last call; what cannot be read now comes later."""
        for entry in self._entries():
            if (rank := self._paths.get(entry.name)) is None:
                continue
            file = self._files.setdefault(rank, MessageFile(entry))
            for line in _read(file):
                try:
                    yield rank, decode_from_rank(line)
                except MessageError as error:  # a line torn by a kill, or by a full disk
                    logger().warning("a message is damaged", file=str(entry), error=str(error))

    def _entries(self) -> list[Path]:
        try:
            entries = list(self._folder.iterdir())
        except OSError as error:
            if not self._blind:
                logger().warning("waiting for storage: the ranks' messages", error=str(error))
            self._blind = True
            return []
        if self._blind:
            logger().warning("storage works again: the ranks' messages can be read")
        self._blind = False
        return entries


def _read(file: MessageFile) -> list[bytes]:
    try:
        return file.news()
    except (OSError, MessageError) as error:
        logger().warning("cannot read a rank's messages", error=str(error))
        return []
