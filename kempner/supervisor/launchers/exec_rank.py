"""Replaces this process by the user's command, as one rank.

    python -m kempner.supervisor.launchers.exec_rank [--torchrun=RANKS] COMMAND...

Any program that reads `env://`, as `torch.distributed.init_process_group` does, finds its place
there, and Gloo and NCCL their network. When the supervisor on this machine dies, it gets SIGTERM.
With `--torchrun` this process is one of several nodes, and becomes the torchrun that starts as many
ranks there.
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
    """Returns only if the command cannot be started, having said why."""
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
    """The torchrun of a node, with its environment made ready.

    It is told whether the rendezvous is on its node, and its address there: it knows no address of
    its machine but that which the host's name means, and would look for its host for ever.
    """
    given = environ.get("PET_RDZV_CONF")
    environ["PET_RDZV_CONF"] = ",".join(
        [*([given] if given else []), f"is_host={int(node.rank == 0)}"]
    )
    if "PET_LOCAL_ADDR" not in environ and (here := _address_near(environ["MASTER_ADDR"])):
        environ["PET_LOCAL_ADDR"] = here
    for name in (OF_AGENT, *node.environment()):  # the ranks get those that torchrun sets
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
    """This node's address on the network of an address; empty if it has none there."""
    for interface in read_interfaces():
        with suppress(ValueError):
            here = ipaddress.ip_interface(interface.address)
            if ipaddress.ip_address(master) in here.network:
                return str(here.ip)
    return ""


if __name__ == "__main__":
    sys.exit(become(sys.argv[1:]))
