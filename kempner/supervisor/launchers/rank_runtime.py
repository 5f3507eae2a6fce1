"""How ranks run in a Slurm step (srun's options, container, Python), and the addresses at which
their agents reach the supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kempner.cluster.network.interfaces import choose, named, read_interfaces, route_address
from kempner.cluster.slurm.node_step import binding_option, container_options
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.worker_process import SAFE_MODULE

if TYPE_CHECKING:
    from kempner.config.site import SlurmSection  # not in a node's agent

OPEN_WITHIN = 600.0
"""Seconds for all nodes to open a container at once; its image was fetched before."""


@dataclass(frozen=True)
class RankRuntime:
    """`options` are further options of srun, `prefix` goes before the ranks' command, `python` is
    their interpreter, `interface` the configured network interface."""

    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    python: str = sys.executable
    interface: str | None = None

    @classmethod
    def of(cls, section: SlurmSection, interface: str | None = None) -> RankRuntime:
        """The configured runtime. A container's working directory is that of this process by
        default."""
        container, options = section.container, tuple(section.srun_args)
        if container.image is not None:
            workdir = container.workdir or str(Path.cwd())
            options = (
                *container_options(
                    container.image, container.mounts, container.mount_home, workdir
                ),
                *options,
            )
        python = section.python or sys.executable
        return cls(options, tuple(container.prefix), python, interface)

    def run(self, module: str) -> list[str]:
        """The command that runs a Python module as the ranks run."""
        return [*self.prefix, self.python, *SAFE_MODULE, module]

    @property
    def has_other_python(self) -> bool:
        """Whether the ranks' Python is another one than the supervisor's, and may lack packages."""
        return self.contained or self.python != sys.executable

    @property
    def contained(self) -> bool:
        """Whether the ranks run in a container."""
        return bool(self.prefix) or self.in_image

    @property
    def in_image(self) -> bool:
        """Whether srun opens a container."""
        return any(option.startswith("--container-image") for option in self.options)

    @property
    def delay(self) -> float:
        """Seconds that a container may add to a start."""
        return OPEN_WITHIN if self.contained else 0.0

    @property
    def binding(self) -> str:
        """The option of srun that places or binds ranks; empty if there is none."""
        return binding_option(self.options)

    def __str__(self) -> str:
        inside = next((o for o in self.options if o.startswith("--container-image")), "")
        container = inside or " ".join(self.prefix)
        return f"{self.python} in `{container}`" if container else self.python


def reachable_addresses(
    nodes: Sequence[str], control: str | None, interface: str | None
) -> tuple[str, ...]:
    """The addresses on which to listen for agents: that of the interface `control`, if given.

    Otherwise two, if they differ: the address on the ranks' network (by the configured `interface`,
    or as found), which may be the only network that connects nodes; and the address from which
    packets to the farthest node leave, by the node's name, since the ranks' network may be down or
    not reach this host.

    Raises `UsageError` if there is none."""
    if control is not None:
        try:
            found = named(read_interfaces(), control, "supervise.control_interface")
        except ValueError as error:
            raise UsageError(str(error)) from error
        return (found.ip,)
    farthest = nodes[-1]
    route = route_address(farthest)
    try:
        of_ranks = rank_address(interface, "")
    except ValueError:  # the ranks report it, on the nodes where it matters
        of_ranks = ""
    if addresses := tuple(filter(None, dict.fromkeys((of_ranks, route)))):
        return addresses
    raise UsageError(
        f"this host has no route to {farthest}, so its ranks cannot reach the supervisor; run it "
        "inside the allocation"
    )


def rank_address(interface: str | None, route: str) -> str:
    """This host's address on the ranks' network, or `route` if no interface is fit. Raises
    `ValueError` if the configured `interface` cannot be used."""
    choice = choose(
        read_interfaces(),
        on_one_node=False,
        configured=interface,
        environ=os.environ,
        route_address=route,
    )
    return route if choice.interface is None else choice.interface.ip
