"""Replaces this process by the user's command, as one rank.

    python -m kempner.supervisor.launchers.exec_rank COMMAND...

Any program that reads `env://`, as `torch.distributed.init_process_group` does, finds its place
there, also in a task of a Slurm step, and Gloo and NCCL their network. When the supervisor on this
machine dies, it gets SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from kempner.cluster.world import discover
from kempner.run.control.launch_env import Launch
from kempner.run.output.console import say
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import follow_parent
from kempner.supervisor.launchers.rank_network import enter_network


def become(command: Sequence[str]) -> ExitCode:
    """Returns only if the command cannot be started, having said why."""
    launch = Launch.from_environment(os.environ)
    if launch is not None and launch.parent is not None:
        follow_parent(launch.parent, signal.SIGTERM)
    try:
        world = discover(os.environ)
        os.environ |= world.environment()
        if launch is not None:
            os.environ |= launch.of_rank(world.rank, os.environ)
        enter_network()
        os.execvp(command[0], list(command))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        say(f"kempner: {command[0]} cannot be started: {reason}", sys.stderr)
    return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(become(sys.argv[1:]))
