"""Replaces this process by the user's command, as one rank.

    python -m kempner.supervisor.launchers.exec_rank [--torchrun=RANKS] COMMAND...

Sets the variables that `env://` reads (`torch.distributed.init_process_group`), and the network of
Gloo and NCCL. The process gets SIGTERM when a supervisor on the same machine dies.

With `--torchrun` it becomes the torchrun of its node, which starts RANKS ranks.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import suppress

from kempner.cluster.network.interfaces import read_interfaces
from kempner.cluster.world import OF_AGENT, World, discover
from kempner.run.control.launch_env import Launch
from kempner.run.output.console import say
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import follow_parent
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.supervisor.launchers.base import TORCHRUN
from kempner.supervisor.launchers.rank_network import enter_network


def become(command: Sequence[str]) -> ExitCode:
    """Execute the command. If that fails, print why and return the exit code."""
    launch = Launch.from_environment(os.environ)
    if launch is not None and launch.parent is not None:
        follow_parent(launch.parent, signal.SIGTERM)
    try:
        world = discover(os.environ)
        if launch is not None and command[0].startswith(TORCHRUN):
            ranks, command = command[0].removeprefix(TORCHRUN), command[1:]
            command = torchrun(int(ranks), command, world, launch.attempt.nonce, os.environ)
        else:
            os.environ |= world.environment()
            if launch is not None:
                os.environ |= launch.of_rank(world.rank, os.environ)
            enter_network()
        os.execvp(command[0], list(command))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        say(f"kempner: {command[0]} cannot be started: {reason}", sys.stderr)
    return ExitCode.USAGE


def torchrun(
    ranks: int,
    command: Sequence[str],
    node: World,
    nonce: str,
    environ: MutableMapping[str, str],
) -> list[str]:
    """The torchrun command of a node; also sets its variables in `environ`.

    PET_RDZV_CONF and PET_LOCAL_ADDR say whether this node hosts the rendezvous, and its address
    there: torchrun itself compares only the address to which the host's name resolves, and could
    wait for a host for ever."""
    given = environ.get("PET_RDZV_CONF")
    environ["PET_RDZV_CONF"] = ",".join(
        [*([given] if given else []), f"is_host={int(node.rank == 0)}"]
    )
    if "PET_LOCAL_ADDR" not in environ and (here := _address_near(environ["MASTER_ADDR"])):
        environ["PET_LOCAL_ADDR"] = here
    for name in (OF_AGENT, *node.environment()):  # torchrun sets its own for the ranks
        environ.pop(name, None)
    return [
        *(sys.executable, *SAFE_MODULE, "torch.distributed.run"),
        f"--nnodes={node.size}",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        f"--rdzv-id={nonce}",
        "--signals-to-handle=SIGINT",  # not SIGTERM, after which it kills its children
        "--no-python",
        *command,
    ]


def _address_near(master: str) -> str:
    """This node's address in the same network as `master`; empty if there is none."""
    for interface in read_interfaces():
        with suppress(ValueError):
            here = ipaddress.ip_interface(interface.address)
            if ipaddress.ip_address(master) in here.network:
                return str(here.ip)
    return ""


if __name__ == "__main__":
    sys.exit(become(sys.argv[1:]))
