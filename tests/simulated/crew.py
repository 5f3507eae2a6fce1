"""Who of an attempt's ranks is there, and moves, and is heard; and every way to end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from kempner.checkpoint.format.manifest import TrainState
from kempner.run.control.protocol import Phase, Report
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.attempts import Attempt
from kempner.supervisor.control.program_reports import LastReport
from kempner.supervisor.policy.outcome import RankExit
from simulated.engine import Life, Process

if TYPE_CHECKING:
    from simulated.world import World

Hear: TypeAlias = "Callable[[Crew, RankExit, float], None]"
"""Who is told of a rank's end, and when the first sign of it was."""

SILENT_AFTER = 23.0
"""Seconds until a machine without power is known to be gone (TCP_USER_TIMEOUT, and the wait)."""

BROKEN_AFTER = 3.0
"""Seconds until a broken connection counts as an end."""

COLLECTIVE = 1800.0
"""Seconds after which a collective that waits for a peer fails."""


class Crew(ABC):
    """The ranks as processes. `hosts[rank]` is a rank's node, `hear` where its end is told."""

    main: Process
    """Of what they do together."""

    def __init__(self, world: World, attempt: Attempt, hosts: list[int], hear: Hear) -> None:
        self.world, self.attempt, self.hosts = world, attempt, hosts
        self._hear = hear
        self.size = len(hosts)
        self.life = Life()
        self.gone: set[int] = set()
        self.stuck: set[int] = set()
        """Ranks whose main thread does not go on."""
        self.stopped: set[int] = set()
        """Ranks of which no thread goes on."""
        self.cut: set[int] = set()
        """Ranks that cannot be heard or killed, but that can write."""
        self._mute: set[int] = set()
        self.phase, self.train_state = Phase.START, TrainState()
        self.asked_at: float | None = None
        self.deadline: float | None = None
        self._seen: dict[int, LastReport] = {}

    @abstractmethod
    def delay_saves(self, seconds: float) -> None:
        """What is being written takes longer."""

    def signal(self) -> None:
        """SIGTERM to each task."""
        self.ask(None)

    def ask(self, seconds_left: float | None) -> None:
        """A stop is asked for, by a signal, or over the channel with its deadline."""
        if self.phase in (Phase.START, Phase.RENDEZVOUS):
            for rank in self.living():
                self.end(rank, ExitCode.STOPPED, "stopped before training began")
            return
        now = self.world.engine.now
        self.asked_at = now if self.asked_at is None else self.asked_at
        grace = self.world.config.supervise.stop_grace if seconds_left is None else seconds_left
        by = now + grace
        self.deadline = by if self.deadline is None else min(by, self.deadline)

    def die(self, rank: int, heard_after: float = BROKEN_AFTER) -> None:
        """A rank disappeared without a message, by SIGKILL or with its machine."""
        if rank in self.gone:
            return
        self._lose(rank)
        if rank not in self.cut:
            self._tell(RankExit(rank, None), heard_after)
        self._notice(1.0 if heard_after == BROKEN_AFTER else COLLECTIVE)

    def crash(self, rank: int, sentence: str) -> None:
        """A rank raises an unexpected error."""
        self.end(rank, ExitCode.CRASHED, sentence)
        self._notice(1.0)

    def hang(self, rank: int) -> None:
        """The main thread of a rank does not come back."""
        if rank not in self.gone:
            self.stuck.add(rank)
            self._notice(COLLECTIVE)

    def stop(self, rank: int) -> None:
        """SIGSTOP."""
        if rank not in self.gone:
            self.stopped.add(rank)
            self.stuck.add(rank)
            self._mute.add(rank)
            self._notice(COLLECTIVE)

    def go_on(self, rank: int) -> None:
        """SIGCONT."""
        if rank in self.stopped:
            self.stopped.discard(rank)
            self.stuck.discard(rank)
            self._mute.discard(rank)
            self._wake()

    def cut_off(self, node: int, seconds: float) -> None:
        """A node is out of reach for all but the shared disk; saves there take longer."""
        ranks = [r for r in self.living() if self.hosts[r] == node]
        for rank in ranks:
            self.cut.add(rank)
            self._mute.add(rank)
            self._tell(RankExit(rank, None), SILENT_AFTER)
        if len(ranks) < len(self.living()):
            self.stuck.update(ranks)
            self._notice(COLLECTIVE)
        self.delay_saves(seconds)

    def lose_node(self, node: int, loud: bool) -> None:
        """A machine is gone, with a reset of its connections or without a word."""
        for rank in self.living():
            if self.hosts[rank] == node:
                self.die(rank, BROKEN_AFTER if loud else SILENT_AFTER)

    def peers_leave(self, told: bool) -> None:
        """Each rank that knows that a peer is gone leaves.

        `told` by the supervisor, a thread does that even for a rank that is stuck; a collective
        that fails ends those that wait in it.
        """
        if not self.gone and not self.stuck:
            return
        for rank in self.living():
            deaf = self.stopped | self.cut if told else self.stuck
            if rank not in deaf:
                self.end(rank, ExitCode.PEERS_LOST, "left, because a peer is gone")

    def kill(self) -> None:
        """SIGKILL to all that can be reached."""
        for rank in self.living():
            if rank not in self.cut:
                self._lose(rank)
                self._tell(RankExit(rank, None, ended_by_us=True))

    def end(self, rank: int, status: ExitCode, sentence: str = "") -> None:
        """A rank leaves and says how."""
        self._lose(rank)
        if rank not in self.cut:
            self._tell(RankExit(rank, int(status), sentence=sentence))
        if status in (ExitCode.STOPPED, ExitCode.PEERS_LOST):
            self.world.left(self, rank)

    def living(self) -> list[int]:
        """The ranks whose processes are there."""
        return [rank for rank in range(self.size) if rank not in self.gone]

    @property
    def over(self) -> bool:
        """Whether none is left that can be reached."""
        return len(self.gone | self.cut) == self.size

    def last_reports(self) -> dict[int, LastReport]:
        """What the supervisor last heard of each rank; they speak once a second."""
        now, phase, step = self.world.engine.now, self.phase, self.train_state.step
        report = Report(step, phase, 0.0, 0.0)
        for rank in range(self.size):
            if rank not in self.gone and rank not in self._mute:
                self._seen[rank] = LastReport(report, now)
        return dict(self._seen)

    def _notice(self, seconds: float) -> None:
        self.world.engine.call(seconds, lambda: self.peers_leave(told=False))

    def _lose(self, rank: int) -> None:
        self.gone.add(rank)
        self._wake()
        if rank == 0 or len(self.gone) == self.size:
            self.life.end()  # rank 0 commits, and nothing is committed without it

    def _tell(self, end: RankExit, after: float = 0.0) -> None:
        """The first sign is now; what it means is known `after` some seconds."""
        sign = self.world.engine.now
        if after:
            self.world.engine.call(after, lambda: self._hear(self, end, sign))
        else:
            self._hear(self, end, sign)

    def _wake(self) -> None:
        if not self.stuck and not self.gone:
            self.main.wake()
