"""Sets the network variables of Gloo, NCCL and CUDA for a user's program.

Runs in the rank's process before the program begins, since interfaces are named differently on
different nodes. `kempner train` does the same from its configuration, and compares the nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from kempner.cluster.network.interfaces import Interface, read_interfaces
from kempner.cluster.world import World, discover, network_of_rank
from kempner.run.control.launch_env import Launch
from kempner.run.output.logs import logger

if TYPE_CHECKING:
    from kempner.config.site import DistributedSection


def enter_network(environ: MutableMapping[str, str] = os.environ) -> None:
    """Add the network variables to this rank's environment, if a supervisor has started it. Raises
    `ValueError` with a sentence if the configured interface cannot be used here."""
    launch = Launch.from_environment(environ)
    if launch is None or launch.terms is None:
        return
    from kempner.config.site import DistributedSection  # a node's agent is spared it

    section = DistributedSection.model_validate_json(launch.terms.network)
    environ.update(variables(environ, section, discover(environ), read_interfaces()))


def variables(
    environ: Mapping[str, str],
    section: DistributedSection,
    world: World,
    interfaces: Sequence[Interface],
) -> dict[str, str]:
    """The variables to add to `environ`; those that the user exported stay.

    A single rank may itself launch ranks on other nodes, and gets no interface. Raises `ValueError`
    as `choose`, but only warns if GLOO_SOCKET_IFNAME was exported: the program may not need it."""
    added = section.environment(environ)
    if world.size == 1:
        return added
    master = environ.get("MASTER_ADDR", "")
    try:
        choice = network_of_rank(environ, world, section.interface, master, interfaces)
    except ValueError as error:
        if "GLOO_SOCKET_IFNAME" not in environ:
            raise
        logger().warning(str(error))
        return added
    if choice.warning:
        logger().warning(choice.warning)
    return added | choice.environment(environ)
