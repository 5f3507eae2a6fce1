"""What is around the ranks of a Slurm step: options of srun, a container, their Python, and where
they find the supervisor."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from kempner.cluster.network.interfaces import named
from kempner.cluster.network.netinfo import read_interfaces, route_address
from kempner.cluster.slurm.allocation import Allocation
from kempner.cluster.slurm.containers import binding_option, container_options
from kempner.config.site.slurm import SlurmSection
from kempner.run.process.exit_codes import UsageError

OPEN_WITHIN = 600.0
"""Seconds for all nodes to open a container at once, whose image was fetched before."""


@dataclass(frozen=True)
class Surroundings:
    """`options` are more of srun's, `prefix` a command before the ranks', and `python` the
    interpreter that they run on."""

    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    python: str = sys.executable

    @classmethod
    def of(cls, section: SlurmSection) -> Surroundings:
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
        return cls(options, tuple(container.prefix), section.python or sys.executable)

    def run(self, module: str) -> list[str]:
        """The command that runs a Python module where the ranks run."""
        return [*self.prefix, self.python, "-m", module]

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


def reachable_address(allocation: Allocation, interface: str | None) -> str:
    """Where to listen: on `interface` if it is given.

    Otherwise the address from which packets to the farthest node leave is one that it can answer.
    Raises `UsageError` if there is none.
    """
    if interface is not None:
        try:
            found = named(read_interfaces(), interface, "supervise.control_interface")
        except ValueError as error:
            raise UsageError(str(error)) from error
        return found.address.partition("/")[0]
    address = route_address(allocation.nodes[-1])
    if not address:
        raise UsageError(
            f"this host has no route to {allocation.nodes[-1]}, so its ranks cannot reach the "
            "supervisor; run it inside the allocation"
        )
    return address
