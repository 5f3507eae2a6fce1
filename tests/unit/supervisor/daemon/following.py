"""An attempt that is followed with nothing real around it: what it hears is made up, and its clock
stands still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import SimpleNamespace

from harness import Clock

from kempner.config.sections import Config
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import Connected, FromSupervisor, Phase, Report, Usage
from kempner.run.record.attempts import Attempt
from kempner.run.record.ledger import Ledger
from kempner.supervisor.attempt import AttemptEvent, AttemptFollower
from kempner.supervisor.control.program_reports import LastReport
from kempner.supervisor.control.rank_connections import RankRoster
from kempner.supervisor.launchers.agents.messages import GpuReport
from kempner.supervisor.monitors.base import RunTimes
from kempner.supervisor.policy.outcome import RankExit
from kempner.supervisor.slurm.job_monitor import JobMonitor, JobView


class Hands:
    """Stands for launcher and channel: keeps what it is asked to do."""

    address = "127.0.0.1"
    nodes = SimpleNamespace(all=())
    agents = SimpleNamespace(waits=False)
    activity = staticmethod(dict)
    look = staticmethod(lambda node, pids: ())

    def __init__(self) -> None:
        self.told: list[FromSupervisor] = []
        self.killed = 0
        self.living = True
        self.gpus: list[tuple[str, GpuReport]] = []
        self.seen: dict[int, LastReport] = {}
        self.usage: dict[int, Usage] = {}

    def start(
        self, launch: Launch, arguments: Sequence[str], post: Callable[[RankExit], None]
    ) -> None: ...

    def alive(self) -> bool:
        return self.living

    def gpu_news(self) -> list[tuple[str, GpuReport]]:
        told, self.gpus = self.gpus, []
        return told

    def kill(self) -> None:
        self.killed += 1

    def last_reports(self) -> dict[int, LastReport]:
        return self.seen

    def tell(self, message: FromSupervisor, rank: int | None = None) -> None:
        self.told.append(message)


def follow(
    hands: Hands, size: int, config: Config, ledger: Ledger, job: JobMonitor | None = None
) -> AttemptFollower:
    """What follows attempt 4 of `size` ranks, from this moment on."""
    roster, attempt = RankRoster(size), Attempt(4, "abcd")
    view, times = JobView(job), RunTimes()
    return AttemptFollower(attempt, roster, config, hands, hands, ledger, view, times)  # type: ignore[arg-type]


def follow_a_rank_that_trains(hands: Hands, ledger: Ledger) -> AttemptFollower:
    """Its only rank is on node1, at step 7."""
    follower = follow(hands, 1, Config(), ledger)
    feed(follower, Connected(0, "node1", 7))
    hands.seen = {0: LastReport(Report(7, Phase.STEP, 0.0, 0.0), 0.0)}
    return follower


def let(follower: AttemptFollower, clock: Clock, seconds: float) -> None:
    """Let time pass as the supervisor's loop sees it, which looks twice a second."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(end, clock.now + 0.5)
        follower.enforce()


def feed(follower: AttemptFollower, *incoming: AttemptEvent) -> None:
    waiting: SimpleQueue[AttemptEvent] = SimpleQueue()
    for attempt_event in incoming:
        waiting.put(attempt_event)
    follower.take_in(waiting, wait=False)
