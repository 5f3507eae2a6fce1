"""Process groups of a rank, from rendezvous to the final barrier, and a check of its device."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    HashStore,
    Store,
    TCPStore,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from kempner.cluster.machine import own_part, raise_open_file_limit
from kempner.cluster.network.interfaces import Interface, InterfaceChoice, disagreement
from kempner.cluster.network.ports import (
    ExportedMaster,
    announce,
    candidates,
    claim,
    exported_master,
    find,
    given_port,
    job_salt,
)
from kempner.cluster.slurm.scontrol import hostnames
from kempner.cluster.world import World, network_of_rank
from kempner.config.sections import Config
from kempner.config.site import DistributedSection
from kempner.model.spec.mesh import MeshDegrees, check_tensor_groups, resolve_mesh
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import PeersLostError, UnfitNodeError, UsageError

_LAST_WORD = timedelta(seconds=30)


def meet(
    world: World, address: str, salt: str, timeout: timedelta, given: int | None = None
) -> TCPStore:
    """Connect to this launch's store, which rank 0 hosts on `address`; blocks until it exists.
    `salt` must be the same on all ranks of a launch and unique to it; `given` is the user's port,
    if set. Raises `PeersLostError` after `timeout`, `OSError` on rank 0 if all its ports are
    taken."""
    if world.rank > 0:
        try:
            port = given or find(address, salt, timeout.total_seconds())
            return TCPStore(
                address, port, world.size, is_master=False, timeout=timeout, wait_for_workers=False
            )
        except (TimeoutError, DistNetworkError) as error:
            raise PeersLostError(f"rank {world.rank}: {error}") from error
    listener = claim(candidates(f"{salt}:store") if given is None else [given])
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        world.size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    if given is None:
        announce(salt, port)
    return store


def agree_on_network(store: Store, world: World, node: str, chosen: Interface | None) -> None:
    """Check that all nodes use the same network, on which a group would otherwise hang. Raises
    `UsageError`, with the interface of every node, on all ranks."""
    keys = [f"kempner/network/{rank}" for rank in range(world.size)]
    own_choice = {"node": node, "interface": None if chosen is None else asdict(chosen)}
    store.set(keys[world.rank], json.dumps(own_choice))
    if world.rank == 0:
        store.wait(keys)
        bound: dict[str, Interface | None] = {}
        for text in store.multi_get(keys):
            choice = json.loads(text)
            bound[choice["node"]] = choice["interface"] and Interface(**choice["interface"])
        store.set("kempner/network", disagreement(bound))
    sentence = store.get("kempner/network").decode()
    if not sentence:
        return
    store.set(f"{keys[world.rank]}/told", "")
    if world.rank == 0:  # the store ends with this rank, so the others must read it first
        store.wait([f"{key}/told" for key in keys], _LAST_WORD)
    raise UsageError(sentence)


_FAREWELL = timedelta(seconds=30)
_LONGEST_EVALUATION = timedelta(days=7)
"""Timeout of votes: if one rank evaluates alone, the others wait for it in the vote. Hangs are
detected elsewhere."""


@dataclass(frozen=True)
class Ranks:
    """This rank's process groups: a mesh to train on, and Gloo groups for votes and saves. `mesh`
    has the dimensions of `degrees`. `store` is the rendezvous, hosted by rank 0; None if another
    process hosts it, as with torchrun."""

    world: World
    device: torch.device
    degrees: MeshDegrees
    mesh: DeviceMesh
    votes: dist.ProcessGroup
    saves: dist.ProcessGroup
    store: Store | None

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of each global batch; equal within a tensor group."""
        return self.degrees.data_rank(self.world.rank)

    def broadcast(self, value: object) -> object:
        """Rank 0's picklable `value`, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.votes)
        return box[0]

    def say(self, words: str) -> None:
        """Print a sentence, on rank 0 only."""
        if self.world.rank == 0:
            say(words)

    def agree_on(self, facts: Mapping[str, object]) -> None:
        """Check that all ranks have the same `facts`, on which their steps depend. Raises
        `UsageError`, on all ranks, with each difference and the ranks' values."""
        rank_facts: list[dict[str, object]] = [{} for _ in range(self.world.size)]
        dist.all_gather_object(rank_facts, {**facts, "host": platform.node()}, group=self.votes)
        if differing := describe_disagreement(rank_facts):
            raise UsageError(differing)

    def final_barrier(self) -> None:
        """Wait for all ranks; rank 0 leaves last, since it hosts the store."""
        dist.barrier(group=self.votes)
        if self.store is None or self.world.size == 1:
            return
        if self.world.rank > 0:
            self.store.set(_leave_key(self.world.rank), "")
        else:
            self.store.wait([_leave_key(rank) for rank in range(1, self.world.size)], _FAREWELL)


def describe_disagreement(rank_facts: Sequence[Mapping[str, object]]) -> str:
    """The facts that differ, with the ranks; empty if none. "host" is each rank's host."""
    names = dict.fromkeys(name for facts in rank_facts for name in facts if name != "host")
    return "; ".join(
        difference for name in names if (difference := _disagreement(name, rank_facts))
    )


def _disagreement(name: str, rank_facts: Sequence[Mapping[str, object]]) -> str:
    """The values of a fact, each with its ranks, the rarest first, which is probably wrong."""
    holders: dict[str, list[int]] = {}
    for rank, facts in enumerate(rank_facts):
        holders.setdefault(str(facts.get(name, "no such fact")), []).append(rank)
    if len(holders) == 1:
        return ""
    ordered = sorted(holders.items(), key=lambda item: (len(item[1]), -item[1][0]))
    shown = [f"{_holders(ranks, rank_facts)} {value}" for value, ranks in ordered]
    return f"{name} is not the same on all ranks: {', '.join(shown)}"


def _holders(ranks: Sequence[int], rank_facts: Sequence[Mapping[str, object]]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} on {rank_facts[ranks[0]].get('host')} has"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} have"


def add_variables(config: Config) -> None:
    """Add the configured variables of NCCL and CUDA to the environment, before either is used."""
    os.environ |= config.distributed.environment(os.environ)


def choose_device(world: World) -> torch.device:
    """The GPU of this local rank (or the only visible one), or the CPU. Call it before CUDA is
    first used. Raises `UsageError` if the node has fewer GPUs than ranks."""
    if (own := own_part(os.environ, world.local_rank)) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = own
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
    """Connect to the other ranks, within `distributed.timeout`. Raises `UsageError` if the network
    cannot be used as configured, or the ranks cannot be divided as in `parallelism`."""
    degrees = resolve_mesh(config, world.size)
    address = _master_address(world)
    choice = _bind(world, config.distributed, address)
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    raise_open_file_limit()
    device = choose_device(world)
    timeout = timedelta(seconds=config.distributed.timeout)
    store = _rendezvous(world, address, timeout)
    if not world.on_one_node:
        agree_on_network(store, world, platform.node(), choice.interface)
        if world.rank == 0:
            over = "" if choice.interface is None else f" over {choice.interface.name}"
            say(f"the ranks meet at {address}:{os.environ['MASTER_PORT']}{over}")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
    own_store = None if world.launcher == "torchrun" else store
    ranks = _group(world, device, timeout, own_store, degrees)
    _refuse_spread_tensor_groups(ranks)
    return ranks


def adopt(world: World, device: torch.device, section: DistributedSection) -> Ranks:
    """The process groups of a rank whose program has called `init_process_group`, or is alone.
    Raises `UsageError` otherwise, or if the network cannot be used as configured."""
    if not dist.is_initialized():
        if world.size > 1:
            raise UsageError(
                f"rank {world.rank} of {world.size} is not part of a process group yet: call "
                "torch.distributed.init_process_group first"
            )
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    world = as_in_group(world)
    os.environ |= section.environment(os.environ)  # perhaps no launcher of kempner has done so
    if world.size > 1:  # the program's own groups may be NCCL's, and Gloo not configured yet
        _bind(world, section, os.environ.get("MASTER_ADDR", ""))
    timeout = timedelta(seconds=section.timeout)
    degrees = MeshDegrees(shard=world.size)
    return _group(world, device, timeout, None, degrees, max(timeout, _LONGEST_EVALUATION))


def as_in_group(world: World) -> World:
    """The world of a rank whose program has made the process group, with or without a launcher."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if world.size > 1 or size == 1:
        return world
    hosts = [""] * size
    group = _gloo_group(_LONGEST_EVALUATION)
    dist.all_gather_object(hosts, platform.node(), group=group)
    dist.destroy_process_group(group)
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return World(rank, size, local.index(rank), len(local), launcher="none")


def open_votes(world: World) -> dist.ProcessGroup:
    """A group for votes, in a program with its own process group and no other of kempner's. Raises
    `UsageError` if the network cannot be used."""
    if world.size > 1:
        _bind(world, DistributedSection(), os.environ.get("MASTER_ADDR", ""))
    return _gloo_group(_LONGEST_EVALUATION)


def _group(
    world: World,
    device: torch.device,
    timeout: timedelta,
    store: Store | None,
    degrees: MeshDegrees,
    votes_within: timedelta | None = None,
) -> Ranks:
    dimensions = degrees.dimensions()
    return Ranks(
        world=world,
        device=device,
        degrees=degrees,
        mesh=init_device_mesh(
            device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions)
        ),
        votes=_gloo_group(votes_within or timeout),
        saves=_gloo_group(timeout),
        store=store,
    )


def _refuse_spread_tensor_groups(ranks: Ranks) -> None:
    """Raise `UsageError`, on all ranks, if a tensor group spans nodes."""
    if ranks.degrees.tensor == 1:
        return
    hosts = [""] * ranks.world.size
    dist.all_gather_object(hosts, platform.node(), group=ranks.votes)
    check_tensor_groups(hosts, ranks.degrees.tensor)


def _master_address(world: World) -> str:
    """Rank 0's host: the first node of the step, which need not be the first of the job."""
    if world.size == 1:
        return "localhost"
    if world.launcher == "srun":
        nodes = hostnames(os.environ["SLURM_STEP_NODELIST"])
        return _exported_master(nodes).address or nodes[0]
    return os.environ["MASTER_ADDR"]


def _exported_master(nodes: Sequence[str] = ()) -> ExportedMaster:
    try:
        return exported_master(os.environ, nodes)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _rendezvous(world: World, address: str, timeout: timedelta) -> Store:
    if world.size == 1:
        return HashStore()
    if world.launcher == "torchrun":  # its agent hosts the store
        found: Store = next(rendezvous("env://", world.rank, world.size, timeout=timeout))[0]
        return found
    if world.launcher in ("srun", "agent"):
        nonce = os.environ.get("KEMPNER_ATTEMPT_NONCE", "")
        # The agents of some nodes may belong to another step.
        salt = job_salt(os.environ if world.launcher == "srun" else {}, nonce)
        of_srun = world.launcher == "srun"  # an agent sets MASTER_PORT, the user's or not
        port = _exported_master().port if of_srun else given_port(os.environ)
        store = meet(world, address, salt, timeout, port)
        # For other code that reads torch's variables; replaces those of a login shell.
        os.environ |= world.environment()
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(store.port)}
        return store
    return TCPStore(
        address,
        int(os.environ["MASTER_PORT"]),
        world.size,
        is_master=world.rank == 0,
        timeout=timeout,
    )


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # every rank is a member
    return group


def _bind(world: World, section: DistributedSection, address: str) -> InterfaceChoice:
    """Make process groups use this node's interface; `address` is the master's."""
    try:
        choice = network_of_rank(os.environ, world, section.interface, address)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if choice.warning:
        logger().warning(choice.warning)
    os.environ.update(choice.environment(os.environ))
    return choice


def _leave_key(rank: int) -> str:
    return f"kempner/goodbye/{rank}"


SIZE = 256
"""Rows of the matrices: enough for all multipliers of a GPU, and fast on a CPU."""


class UnfitDeviceError(UnfitNodeError):
    """The device computes wrong results."""


def check_device(device: torch.device, node: str) -> None:
    """Multiply matrices of small integers on `device`, which is exact in float32 and in TF32. The
    sums stay below 2^24, so that no order of addition rounds. Raises `UnfitDeviceError`; errors of
    the device itself pass through."""
    rows, columns = torch.arange(SIZE).unsqueeze(1), torch.arange(SIZE).unsqueeze(0)
    left, right = (3 * rows + 5 * columns) % 8, (7 * rows + columns * columns) % 8
    expected = left.to(torch.float64) @ right.to(torch.float64)
    got = left.to(device, torch.float32) @ right.to(device, torch.float32)
    wrong = int((got.cpu().to(torch.float64) != expected).sum())
    if wrong:
        raise UnfitDeviceError(
            f"{device} of {node} computes wrong results: {wrong} of {SIZE * SIZE} product elements "
            "are wrong"
        )
