"""A supervisor that can only start its ranks: python told_by_channel_alone.py CONFIG [overrides].

It does not see them end; all it knows comes over the control channel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from kempner.config.loading import load
from kempner.run.control.launch_env import Launch
from kempner.run.process.signals import inbox
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.rank_connections import RankChannel
from kempner.supervisor.daemon import supervise
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.local import this_machine
from kempner.supervisor.policy.outcome import RankExit

SIZE = 2


class Elsewhere(Launcher):
    """As where a scheduler stands between, that forwards nothing and never gets ready."""

    def start(
        self,
        launch: Launch,
        program: Program,
        post: Callable[[RankExit], None],
        channel: RankChannel | None = None,
    ) -> None:
        """Start the ranks and look away."""
        super().start(launch, program, lambda end: None, channel)

    def alive(self) -> bool:
        """Not known to be over."""
        return True


if __name__ == "__main__":
    inbox().install()
    config = load(Path(sys.argv[1]), sys.argv[2:])
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    launcher = Elsewhere(*this_machine(run, SIZE))
    sys.exit(supervise(run, launcher, Program.train(sys.argv[1:]), config, inbox()))
