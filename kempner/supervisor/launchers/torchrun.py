"""torchrun launcher: a Slurm step with one torchrun per node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kempner.cluster.network.master import choose_master
from kempner.cluster.slurm.allocation import Allocation
from kempner.config.sections import SuperviseSection
from kempner.run.control.launch_env import Launch
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.srun import DEAF, SrunLauncher
from kempner.supervisor.launchers.surroundings import Surroundings
from kempner.supervisor.policy.outcome import RankExit

_HOSTS = (
    '[ "$SLURMD_NODENAME" = "$0" ] && hosts=1 || hosts=0; '
    'export PET_RDZV_CONF="${PET_RDZV_CONF:+$PET_RDZV_CONF,}is_host=$hosts"; exec "$@"'
)
"""Tells torchrun whether the rendezvous is on its node: it knows no address of its machine but that
which the host's name means, and would look for its host for ever."""


class TorchrunLauncher(SrunLauncher):
    """Starts one torchrun per node, and that the ranks.

    torchrun kills its children 30 seconds after it is signalled. It is therefore started to ignore
    SIGTERM, and the ranks are asked to stop by the control channel alone.

    `addresses` are those of nodes on the network that the ranks use, as far as they are known:
    there the torchruns meet, too.
    """

    def __init__(
        self,
        allocation: Allocation,
        section: SuperviseSection,
        surroundings: Surroundings | None = None,
        addresses: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(allocation, section, surroundings)
        self._addresses = addresses

    def ask_to_stop(self) -> None:
        """Nothing: a signal would reach torchrun only."""

    def _post_end(self, task: int, status: int, post: Callable[[RankExit], None]) -> None:
        """Nothing: a task is torchrun, and how that ends says little about its ranks."""

    def _tasks_per_node(self) -> int:
        return 1

    def _rank(self, launch: Launch, program: Program) -> list[str]:
        nodes = self._allocation.nodes
        address, port = choose_master(os.environ, nodes, launch.attempt.nonce, self._addresses)
        hosts = ["sh", "-c", _HOSTS, nodes[0]]
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
