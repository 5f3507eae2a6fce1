"""Rendezvous: ranks meet by environment variables, and agree on the network to use."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]

from kempner.cluster.network.interfaces import Interface, disagreement
from kempner.cluster.network.port_discovery import announce, find
from kempner.cluster.network.ports import candidates, claim
from kempner.cluster.world import World
from kempner.run.process.exit_codes import PeersLostError, UsageError

_LAST_WORD = timedelta(seconds=30)


def meet(
    world: World, address: str, salt: str, timeout: timedelta, given: int | None = None
) -> TCPStore:
    """This launch's store, hosted by rank 0 on the host `address`; blocks until it is there.

    `salt` must be the same on all ranks of a launch and differ from every other launch's; `given`
    is the port if that is the user's choice. Raises `PeersLostError` after `timeout`, `OSError` on
    rank 0 if all its ports are taken.
    """
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
    """Make sure that all nodes bind to the same network, before a group hangs over it.

    Raises `UsageError`, with the interface of every node, on all ranks alike.
    """
    keys = [f"kempner/network/{rank}" for rank in range(world.size)]
    told = {"node": node, "interface": None if chosen is None else asdict(chosen)}
    store.set(keys[world.rank], json.dumps(told))
    if world.rank == 0:
        store.wait(keys)
        bound: dict[str, Interface | None] = {}
        for text in store.multi_get(keys):
            said = json.loads(text)
            bound[said["node"]] = said["interface"] and Interface(**said["interface"])
        store.set("kempner/network", disagreement(bound))
    sentence = store.get("kempner/network").decode()
    if not sentence:
        return
    store.set(f"{keys[world.rank]}/told", "")
    if world.rank == 0:  # the store goes with this rank, so the others read it first
        store.wait([f"{key}/told" for key in keys], _LAST_WORD)
    raise UsageError(sentence)
