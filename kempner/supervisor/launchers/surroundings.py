"""What is around the ranks of a Slurm step: options of srun, a container, their Python, and where
they find the supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.cluster.network.interfaces import choose, named, read_interfaces, route_address
from kempner.cluster.slurm.node_step import binding_option, container_options
from kempner.config.site import SlurmSection
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.worker_process import SAFE_MODULE

OPEN_WITHIN = 600.0
"""Seconds for all nodes to open a container at once, whose image was fetched before."""


@dataclass(frozen=True)
class Surroundings:
    """`options` are more of srun's, `prefix` a command before the ranks', `python` the interpreter
    that they run on, and `interface` that of the network that they are to use, if one is named."""

    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    python: str = sys.executable
    interface: str | None = None

    @classmethod
    def of(cls, section: SlurmSection, interface: str | None = None) -> Surroundings:
        """As configured. A container begins in the folder that this process is in."""
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
        """The command that runs a Python module where the ranks run."""
        return [*self.prefix, self.python, *SAFE_MODULE, module]

    @property
    def foreign(self) -> bool:
        """Whether the ranks' Python may lack what the supervisor's has."""
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
        """Seconds that what starts there may take longer than elsewhere."""
        return OPEN_WITHIN if self.contained else 0.0

    @property
    def binding(self) -> str:
        """The option by which srun is to place or bind each rank; empty if there is none."""
        return binding_option(self.options)

    def __str__(self) -> str:
        inside = next((o for o in self.options if o.startswith("--container-image")), "")
        around = inside or " ".join(self.prefix)
        return f"{self.python} in `{around}`" if around else self.python


def reachable_addresses(
    nodes: Sequence[str], control: str | None, interface: str | None
) -> tuple[str, ...]:
    """Where to listen: on the interface `control` if it is given.

    Otherwise on the network that ranks use, by the configured `interface` or what is found, which
    may be the only one that connects nodes; and at the address from which packets to the farthest
    node leave, by its name, since that network may be down, or not lead to this host.
    Raises `UsageError` if there is none.
    """
    if control is not None:
        try:
            found = named(read_interfaces(), control, "supervise.control_interface")
        except ValueError as error:
            raise UsageError(str(error)) from error
        return (found.address.partition("/")[0],)
    farthest = nodes[-1]
    route = route_address(farthest)
    tried = dict.fromkeys((_of_ranks(interface), route))
    if addresses := tuple(filter(None, tried)):
        return addresses
    raise UsageError(
        f"this host has no route to {farthest}, so its ranks cannot reach the supervisor; run it "
        "inside the allocation"
    )


def _of_ranks(interface: str | None) -> str:
    """The address of this host on the network that ranks use; empty if that cannot be told."""
    try:
        choice = choose(
            read_interfaces(),
            on_one_node=False,
            configured=interface,
            environ=os.environ,
            route_address="",
        )
    except ValueError:  # the ranks say so, on the nodes where it matters
        return ""
    return "" if choice.interface is None else choice.interface.address.partition("/")[0]
