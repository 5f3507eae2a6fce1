"""Finding rank 0 from nothing but the environment, and agreeing on the network to use.

Rank 0 hosts torch's TCPStore on the first free port of a list that all ranks compute (see
`kempner.cluster.ports`). A port further up the list may belong to somebody else, even to another
run's store, so the others look for a key that only this launch's store has.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistStoreError,
    Store,
    TCPStore,
)

from kempner.cluster.interfaces import Interface, disagreement
from kempner.cluster.ports import candidates, claim
from kempner.cluster.world import World
from kempner.run.exit_codes import UsageError

_CONNECT = 5.0
"""Seconds to wait for an answer on one port; one that nobody listens on refuses at once."""
_PAUSE = 0.1
"""Seconds between rounds over the ports while rank 0 is not there yet."""


def meet(world: World, address: str, salt: str, timeout: timedelta) -> TCPStore:
    """This launch's store, hosted by rank 0 on the host `address`; blocks until it is there.

    `salt` must be the same on all ranks of a launch and differ from every other launch's. Raises
    torch's `DistStoreError` after `timeout`, `OSError` on rank 0 if all ports are taken.
    """
    ports, mark = candidates(salt), f"kempner/launch/{salt}"
    if world.rank > 0:
        return _join(address, ports, mark, world, timeout)
    listener = claim(ports)
    store = TCPStore(
        address,
        listener.getsockname()[1],
        world.size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    store.set(mark, "")
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
    if sentence := store.get("kempner/network").decode():
        raise UsageError(sentence)


def _join(
    address: str, ports: Sequence[int], mark: str, world: World, timeout: timedelta
) -> TCPStore:
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        for port in ports:
            if _answers(address, port) and (store := _store(address, port, world, mark)):
                store.set_timeout(timeout)
                return store
        time.sleep(_PAUSE)
    raise DistStoreError(
        f"rank {world.rank} found no rank 0 on {address} within {timeout.total_seconds():g} s, on "
        f"none of the ports {', '.join(map(str, ports))}"
    )


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _CONNECT).close()
    except OSError:
        return False
    return True


def _store(address: str, port: int, world: World, mark: str) -> TCPStore | None:
    """The store behind a port, if it is this launch's; a port of anybody else is passed over."""
    try:
        store = TCPStore(
            address,
            port,
            world.size,
            is_master=False,
            timeout=timedelta(seconds=_CONNECT),
            wait_for_workers=False,
        )
        return store if store.check([mark]) else None
    except DistError:
        return None
