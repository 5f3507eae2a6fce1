"""Runs a Python program as a rank of a rehearsal: python -m kempner.training.rehearsal.rank FILE...

Records also what the program does before it calls kempner.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from kempner.run.control.rehearsal import RehearsalPart
from kempner.run.process.signals import STOP_SIGNALS, signal_at_end_of
from kempner.training.rehearsal.switch import recorder


def main(arguments: list[str]) -> None:
    signal_at_end_of(os.getppid(), signal.SIGKILL)  # no rank outlives the rehearsal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    part = RehearsalPart.from_environment()
    os.chdir(part.cwd if part is not None else ".")  # instead of the fork server's directory
    recorder()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
