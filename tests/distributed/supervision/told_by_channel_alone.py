"""A supervisor that can only start its ranks: python told_by_channel_alone.py CONFIG [overrides].

It cannot signal them and does not see them end; all it knows comes over the control channel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from kempner.config.loading import load
from kempner.run.control.launch_env import Launch
from kempner.run.output import logs
from kempner.run.process.signals import inbox
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.daemon import supervise
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.local import LocalLauncher
from kempner.supervisor.policy.outcome import RankExit

SIZE = 2


class Elsewhere(LocalLauncher):
    """As where a scheduler stands between, that forwards nothing and never gets ready."""

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start the ranks and look away."""
        super().start(launch, program, post=lambda end: None)

    def ask_to_stop(self) -> None:
        """Say nothing."""

    def alive(self) -> bool:
        """Not known to be over."""
        return True


if __name__ == "__main__":
    inbox().install()
    logs.configure()
    config = load(Path(sys.argv[1]), sys.argv[2:])
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    launcher = Elsewhere(run, SIZE)
    sys.exit(supervise(run, launcher, Program.train(sys.argv[1:]), config, inbox()))
