"""torchrun launcher: a Slurm step with one torchrun per node."""

from __future__ import annotations

import os
from collections.abc import Callable

from kempner.cluster.network.interfaces import common_address
from kempner.cluster.network.ports import choose_master
from kempner.run.control.launch_env import Launch
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.srun import DEAF, SrunLauncher
from kempner.supervisor.policy.outcome import RankExit

_HOSTS = (
    '[ "$SLURMD_NODENAME" = "$0" ] && hosts=1 || hosts=0; '
    'export PET_RDZV_CONF="${PET_RDZV_CONF:+$PET_RDZV_CONF,}is_host=$hosts"; '
    'for at in $1; do if [ "${at%%=*}" = "$SLURMD_NODENAME" ]; then '
    'export PET_LOCAL_ADDR="${at#*=}"; fi; done; shift; exec "$@"'
)
"""Tells torchrun whether the rendezvous is on its node, and the node's address, where the workers
meet if it has rank 0: it knows no address of its machine but that which the host's name means, and
would look for its host for ever."""


class TorchrunLauncher(SrunLauncher):
    """Starts one torchrun per node, and that the ranks.

    torchrun kills its children 30 seconds after it is signalled. It is therefore started to ignore
    SIGTERM, and the ranks are asked to stop by the control channel alone.
    """

    def ask_to_stop(self) -> None:
        """Nothing: a signal would reach torchrun only."""

    def _post_end(self, task: int, status: int, post: Callable[[RankExit], None]) -> None:
        """Nothing: a task is torchrun, and how that ends says little about its ranks."""

    def _tasks_per_node(self) -> int:
        return 1

    def _rank(self, launch: Launch, program: Program) -> list[str]:
        nodes = self._allocation.nodes
        address, port = choose_master(os.environ, nodes, launch.attempt.nonce, self.bound)
        hosts = ["sh", "-c", _HOSTS, nodes[0], " ".join(self._local_addresses())]
        torchrun = self._around.run("torch.distributed.run")
        options = [
            f"--nnodes={len(nodes)}",
            f"--nproc-per-node={self._allocation.tasks_per_node}",
            "--max-restarts=0",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={address}:{port}",
            f"--rdzv-id={launch.attempt.nonce}",
            "--signals-to-handle=SIGINT",
            "--no-python",
        ]
        return [*DEAF, *hosts, *torchrun, *options, *program.command]

    def _local_addresses(self) -> list[str]:
        """`NODE=ADDRESS` of each node, on the network that the ranks use."""
        nodes = self._allocation.nodes
        if not common_address(self.bound, nodes):
            return []
        known = {node: self.bound.get(node) for node in nodes}
        return [f"{n}={at.address.partition('/')[0]}" for n, at in known.items() if at]
