"""Finds this process's rank and world size, from the launcher that started it; and a rank's network
interface.

A login shell's stale `RANK=0 WORLD_SIZE=99` must not make a single process wait for peers that do
not exist: torch's variables count only if torchrun or a kempner supervisor set them. Slurm's count
only in a step: a batch script and a shell under `salloc` see `SLURM_NTASKS=8`, but are one process
each. They even have a step's variables if the shell that submitted them was in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kempner.cluster.machine import JobPlace, find_place
from kempner.cluster.network.interfaces import (
    Interface,
    InterfaceChoice,
    choose,
    read_interfaces,
    route_address,
)
from kempner.cluster.slurm.hostlist import expand_counts

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

OF_AGENT = "KEMPNER_OF_AGENT"
"""Set in the environment of a rank that its node's agent started."""


@dataclass(frozen=True)
class World:
    """A rank's place. `local_rank` and `local_size` count the ranks of this node, which may differ
    from other nodes'. `launcher` is what set the place; `warning` is a sentence for the log, or
    empty."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    warning: str = ""

    @property
    def on_one_node(self) -> bool:
        return self.local_size == self.size

    def environment(self) -> dict[str, str]:
        """The place as torch's environment variables, for `env://`."""
        place = (self.rank, self.size, self.local_rank, self.local_size)
        return dict(zip(_NAMES, map(str, place), strict=True))


def discover(environ: Mapping[str, str]) -> World:
    """Read this process's place from its environment. Raises `ValueError` with a sentence if a
    launcher's variables are incomplete or contradictory."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return _placed(environ, "torchrun")
    if "KEMPNER_SUPERVISOR_PID" in environ:
        return _placed(environ, "kempner")
    if OF_AGENT in environ:
        return _placed(environ, "agent")
    if "SLURM_STEP_NUM_TASKS" in environ and find_place(environ) is JobPlace.STEP:
        return _task(environ)
    return World(0, 1, 0, 1, launcher="none", warning=_stale(environ, {}))


def _placed(environ: Mapping[str, str], launcher: str) -> World:
    rank, size, local_rank, local_size = (_number(environ, name, launcher) for name in _NAMES)
    return _checked(World(rank, size, local_rank, local_size, launcher))


def _task(environ: Mapping[str, str]) -> World:
    """A task of a Slurm step. Its local rank is Slurm's, not rank modulo GPUs: tasks may be
    distributed unevenly (`2(x3),1`) or in turns (`srun -m cyclic`)."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    rank, size, local_rank, node = (_number(environ, name, "srun") for name in names)
    per_node = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    if sum(per_node) != size or not 0 <= node < len(per_node):
        raise ValueError(
            f"srun set SLURM_STEP_NUM_TASKS={size} and SLURM_NODEID={node}, which do not fit "
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')}"
        )
    world = _checked(World(rank, size, local_rank, per_node[node], "srun"))
    return replace(world, warning=_stale(environ, world.environment()))


def _stale(environ: Mapping[str, str], right: Mapping[str, str]) -> str:
    stale = [
        f"{name}={environ[name]}"
        for name in _NAMES
        if name in environ and environ[name] != right.get(name)
    ]
    if not stale:
        return ""
    return f"{' '.join(stale)} in the environment is ignored: neither torchrun nor kempner set it"


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    if name not in environ:
        raise ValueError(f"{launcher} started this rank without {name}")
    try:
        return int(environ[name])
    except ValueError as error:
        raise ValueError(
            f"{launcher} set {name} to something that is not a number: {environ[name]!r}"
        ) from error


def _checked(world: World) -> World:
    ranks = 0 <= world.rank < world.size
    if not ranks or not 0 <= world.local_rank < world.local_size <= world.size:
        raise ValueError(
            f"{world.launcher} set RANK={world.rank} of {world.size} and "
            f"LOCAL_RANK={world.local_rank} of {world.local_size}, which cannot be"
        )
    return world


def network_of_rank(
    environ: Mapping[str, str],
    world: World,
    configured: str | None,
    master: str,
    interfaces: Sequence[Interface] | None = None,
) -> InterfaceChoice:
    """The interface for a rank whose rendezvous is at `master` (may be empty). `configured` is
    distributed.interface, `interfaces` are this node's. Raises `ValueError` as `choose`."""
    return choose(
        read_interfaces() if interfaces is None else interfaces,
        on_one_node=world.on_one_node,
        configured=configured,
        environ=environ,
        route_address=route_address(master) if master else "",
    )
