"""Deals a node's CPUs out to its ranks, as srun would to tasks of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from kempner.cluster.machine.job_place import JobPlace, find_place
from kempner.cluster.slurm.command import step_environment
from kempner.config.sections import SuperviseSection
from kempner.supervisor.launchers.surroundings import Surroundings

_BINDINGS = ("SLURM_CPU_BIND", "SLURM_GPU_BIND", "SLURM_MEM_BIND", "SLURM_TRES_BIND")


def binding_asked_for(environ: Mapping[str, str]) -> str:
    """The variable by which a step is told how to bind its tasks; empty if there is none.

    Only srun can do that, to ranks that are tasks of their own: an agent would be bound instead.
    """
    return next((name for name in _BINDINGS if environ.get(name)), "")


def shares(cpus: Collection[int], ranks: int) -> list[tuple[int, ...]]:
    """One share of the CPUs per rank, in this order, of cores that are neighbours.

    Empty shares, which leave a rank all of them, where there are fewer CPUs than ranks.
    """
    ordered = in_order_of_cores(cpus)
    if len(ordered) < ranks or ranks < 2:
        return [()] * ranks
    bounds = [len(ordered) * rank // ranks for rank in range(ranks + 1)]
    return [tuple(ordered[a:b]) for a, b in pairwise(bounds)]


def in_order_of_cores(
    cpus: Collection[int], sys: Path = Path("/sys/devices/system/cpu")
) -> Sequence[int]:
    """CPUs by package and core, so that the threads of a core stay together; by number where the
    kernel does not say."""
    return sorted(cpus, key=lambda cpu: (*_place(sys / f"cpu{cpu}" / "topology"), cpu))


def _place(topology: Path) -> tuple[int, int]:
    try:
        package, core = (
            int((topology / name).read_text()) for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return 0, 0
    return package, core


def why_no_agents(
    section: SuperviseSection, environ: Mapping[str, str], surroundings: Surroundings
) -> str:
    """Why the ranks of a job must be tasks of srun; empty if agents can fork them."""
    if section.ports is not None and len(section.ports) < 2:
        return "supervise.control_ports has only one port"
    in_step = find_place(environ) is JobPlace.STEP
    bound = surroundings.binding or binding_asked_for(step_environment(environ, in_step))
    return f"{bound} binds them, which only srun can do" if bound else ""
