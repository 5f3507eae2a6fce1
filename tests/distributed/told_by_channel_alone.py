"""A supervisor whose ranks get no signal: python told_by_channel_alone.py CONFIG [overrides]."""

from __future__ import annotations

import sys
from pathlib import Path

from kempner.config.loading import load
from kempner.run import logs
from kempner.run.layout import RunDirectory
from kempner.run.signals import inbox
from kempner.supervisor.local import LocalLauncher
from kempner.supervisor.supervise import supervise

SIZE = 2


class WithoutSignals(LocalLauncher):
    """As where a scheduler stands between, and forwards nothing."""

    def ask_to_stop(self) -> None:
        """Say nothing."""


if __name__ == "__main__":
    inbox().install()
    logs.configure()
    config = load(Path(sys.argv[1]), sys.argv[2:])
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    launcher = WithoutSignals(run, SIZE)
    sys.exit(supervise(run, launcher, sys.argv[1:], SIZE, config.supervise, inbox()))
