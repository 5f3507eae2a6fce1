"""Cuts the network between a supervisor and its ranks for some seconds; no rank may be given up.

    unshare --net python cut_off.py SECONDS FOLDER

All of them live in one network of their own, which then loses every packet. There are two attempts
at once: one with steps of a tenth of a second, and one that makes no step all the while.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from callers import SIZE, Supervisor
from harness import wait_until

from kempner.config.sections import Config
from kempner.probe.activity import Stillness
from kempner.run.control.protocol import Phase
from kempner.run.record.attempts import Attempt
from kempner.run.record.ledger import Ledger
from kempner.supervisor.attempt import AttemptFollower
from kempner.supervisor.control.rank_connections import AWAY, RankRoster
from kempner.supervisor.launchers.agents.messages import GpuReport
from kempner.supervisor.monitors.base import RunTimes
from kempner.supervisor.slurm.job_monitor import JobView

FRESH = 3.0
"""Seconds within which a rank that is connected has reported."""


class Launcher:
    """Stands for the ranks' processes: they live."""

    nodes = SimpleNamespace(all=())
    agents = SimpleNamespace(waits=False)
    look = staticmethod(lambda node, pids: ())

    def alive(self) -> bool:
        return True

    def activity(self) -> dict[int, Stillness]:
        return {}

    def gpu_news(self) -> list[tuple[str, GpuReport]]:
        return []

    def kill(self) -> None:
        raise AssertionError("the ranks are to be killed")


class Crew:
    """An attempt and its ranks, whose steps take `step` seconds."""

    def __init__(self, folder: Path, step: float) -> None:
        self.supervisor, self.step = Supervisor(folder), step
        self.ranks = [self.supervisor.link(rank) for rank in range(SIZE)]
        ledger, times = Ledger(folder / "ledger.jsonl"), RunTimes()
        roster, view = RankRoster(SIZE), JobView(None)
        self.follower = AttemptFollower(
            Attempt(3, "abcd"), roster, Config(), Launcher(), self.supervisor.channel, ledger, view,
            times,
        )  # type: ignore[arg-type]  # fmt: skip
        self.began = time.monotonic()

    def live(self) -> None:
        """A look of the supervisor, and a moment of the ranks' training."""
        for rank in self.ranks:
            rank.progress.phase = Phase.STEP
            rank.progress.made(1 + int((time.monotonic() - self.began) / self.step))
        self.follower.take_in(self.supervisor.news, wait=False)
        self.follower.enforce()
        assert self.follower.ends == [], self.follower.ends

    def all_heard(self) -> bool:
        seen = self.supervisor.channel.last_reports()
        now = time.monotonic()
        return len(seen) == SIZE and all(now - last.at < FRESH for last in seen.values())


TINY = ("rate", "8bit", "burst", "10", "limit", "10")


def lose_packets(lose: bool) -> None:
    """A queue that is too small for any packet loses them all, and no sender is told."""
    act = ["add", "dev", "lo", "root", "tbf", *TINY] if lose else ["del", "dev", "lo", "root"]
    subprocess.run(["tc", "qdisc", *act], check=True)


def main() -> None:
    cut, folder = float(sys.argv[1]), Path(sys.argv[2])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    crews = [Crew(folder / str(step), step) for step in (0.1, 1000.0)]

    def live() -> bool:
        for crew in crews:
            crew.live()
        return all(crew.all_heard() for crew in crews)

    wait_until(live, "all ranks are heard", interval=0.1)
    lose_packets(True)
    healed = time.monotonic() + cut
    while time.monotonic() < healed:
        live()
        time.sleep(0.1)
    lose_packets(False)
    wait_until(live, "all ranks are heard again", deadline=AWAY, interval=0.1)
    print("no rank was given up")


if __name__ == "__main__":
    main()
