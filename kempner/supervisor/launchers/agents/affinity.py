"""The CPUs and devices of a node's ranks: equal shares, or what srun's binding options give them.

    python -m kempner.supervisor.launchers.agents.affinity

prints to what srun has bound it. It runs in a step with the user's options and one task per rank,
and the agents bind their ranks in the same way."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import get_args

from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.slurm.node_step import in_lines, whole_answers
from kempner.run.process.durable_io import adapter_of
from kempner.supervisor.launchers.agents.messages import Devices, TaskBinding

_BINDINGS = ("SLURM_CPU_BIND", "SLURM_GPU_BIND", "SLURM_MEM_BIND", "SLURM_TRES_BIND")


@dataclass(frozen=True)
class _BoundTask:
    node: str
    task: int
    binding: TaskBinding


def binding_asked_for(environ: Mapping[str, str]) -> str:
    """The environment variable that tells srun how to bind tasks; empty if none is set."""
    return next((name for name in _BINDINGS if environ.get(name)), "")


def unbound(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without those variables, for agents, which must not be bound themselves."""
    return {name: text for name, text in environ.items() if not name.startswith(_BINDINGS)}


def bindings_by_node(lines: Iterable[str]) -> dict[str, tuple[TaskBinding, ...]]:
    """The bindings of each node's tasks, by node, from their output."""
    tasks = defaultdict[str, dict[int, TaskBinding]](dict)
    for answer in whole_answers(lines):
        bound = adapter_of(_BoundTask).validate_json(answer)
        tasks[bound.node][bound.task] = bound.binding
    return {node: tuple(bound[task] for task in sorted(bound)) for node, bound in tasks.items()}


def bindings_of_ranks(
    given: Sequence[TaskBinding], cpus: Collection[int], ranks: int
) -> Sequence[TaskBinding]:
    """One per rank of a node: those `given`, or shares of the `cpus`."""
    if len(given) == ranks:
        return given
    return [TaskBinding(share) for share in shares(cpus, ranks)]


def shares(cpus: Collection[int], ranks: int) -> list[tuple[int, ...]]:
    """One share of neighbouring cores per rank, in rank order; if there are fewer CPUs than ranks,
    empty shares, which leave a rank all CPUs."""
    ordered = in_order_of_cores(cpus)
    if len(ordered) < ranks or ranks < 2:
        return [()] * ranks
    bounds = [len(ordered) * rank // ranks for rank in range(ranks + 1)]
    return [tuple(ordered[a:b]) for a, b in pairwise(bounds)]


def in_order_of_cores(
    cpus: Collection[int], sys: Path = Path("/sys/devices/system/cpu")
) -> Sequence[int]:
    """CPUs sorted by package and core, so that the threads of a core stay together; by number if
    the kernel does not tell."""
    return sorted(cpus, key=lambda cpu: (*_place(sys / f"cpu{cpu}" / "topology"), cpu))


def _place(topology: Path) -> tuple[int, int]:
    try:
        package, core = (
            int((topology / name).read_text()) for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return 0, 0
    return package, core


def _own_binding(environ: Mapping[str, str]) -> str:
    devices = {name: environ[name] for name in get_args(Devices) if name in environ}
    binding = TaskBinding(tuple(sorted(os.sched_getaffinity(0))), devices)
    bound = _BoundTask(node_name(environ), int(environ["SLURM_LOCALID"]), binding)
    return in_lines(f"{bound.node}:{bound.task}", adapter_of(_BoundTask).dump_json(bound))


if __name__ == "__main__":
    print(_own_binding(os.environ), end="")
