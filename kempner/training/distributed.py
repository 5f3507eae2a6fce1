"""The process groups of a rank, from the first connection to the last goodbye."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kempner.cluster.interfaces import interface_environment
from kempner.cluster.limits import raise_open_file_limit
from kempner.cluster.world import World
from kempner.config.sections import Config
from kempner.run.exit_codes import UsageError

_FAREWELL = timedelta(seconds=30)


@dataclass(frozen=True)
class Ranks:
    """This rank's connections: one group to train on, and Gloo groups to vote and to save on.

    `store` is the rendezvous, hosted by rank 0; None under torchrun, which hosts its own.
    """

    world: World
    device: torch.device
    mesh: DeviceMesh
    votes: dist.ProcessGroup
    saves: dist.ProcessGroup
    store: Store | None

    def broadcast(self, value: object) -> object:
        """Rank 0's picklable `value`, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.votes)
        return box[0]

    def farewell(self) -> None:
        """Wait for each other; rank 0, without whose store the others could fail, leaves last."""
        dist.barrier(group=self.votes)
        if self.store is None or self.world.size == 1:
            return
        if self.world.rank > 0:
            self.store.set(_goodbye(self.world.rank), "")
        else:
            self.store.wait([_goodbye(rank) for rank in range(1, self.world.size)], _FAREWELL)


def choose_device(world: World) -> torch.device:
    """The GPU of this local rank (or the only visible one), or the CPU.

    Raises `UsageError` if the node has fewer GPUs than ranks.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        return torch.device("cpu")
    if visible > 1 and world.local_rank >= visible:
        raise UsageError(
            f"local rank {world.local_rank} has no GPU: {visible} are visible for "
            f"{world.local_size} ranks on this node; start one rank per GPU"
        )
    device = torch.device("cuda", world.local_rank % visible)
    torch.cuda.set_device(device)
    return device


def connect(world: World, config: Config) -> Ranks:
    """Meet the other ranks. Blocks until all are there, or `distributed.timeout` is over."""
    _prepare_environment(world, config)
    raise_open_file_limit()
    device = choose_device(world)
    timeout = timedelta(seconds=config.distributed.timeout)
    store = _rendezvous(world, timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
    return Ranks(
        world=world,
        device=device,
        mesh=init_device_mesh(device.type, (world.size,), mesh_dim_names=("fsdp",)),
        votes=_gloo_group(timeout),
        saves=_gloo_group(timeout),
        store=store,
    )


def _rendezvous(world: World, timeout: timedelta) -> Store | None:
    if world.launcher == "torchrun":
        return None  # its agent hosts the store, and env:// finds it
    if world.size == 1:
        return HashStore()
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world.size,
        is_master=world.rank == 0,
        timeout=timeout,
    )


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # every rank is a member
    return group


def _prepare_environment(world: World, config: Config) -> None:
    try:
        interface = interface_environment(
            config.distributed.interface, world.on_one_node, os.environ
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    os.environ.update(interface)
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _goodbye(rank: int) -> str:
    return f"kempner/goodbye/{rank}"
