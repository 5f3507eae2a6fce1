"""The part of a Slurm job that the ranks use: nodes, tasks per node, CPUs per task."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kempner.cluster.slurm.hostlist import expand_counts
from kempner.cluster.slurm.resources import Resources


@dataclass(frozen=True)
class Allocation:
    """The part of a job in which the ranks run.

    `job` is the id by which to speak of it to Slurm. `batch` says that this process is the job's
    batch process; if not, the job is somebody's `salloc`, and others may run in it. `cpus_per_task`
    is None where nobody says. `spare` nodes have no ranks until another is lost.
    """

    job: str
    nodes: tuple[str, ...]
    tasks_per_node: int
    cpus_per_task: int | None
    gpus_per_node: int
    batch: bool
    spare: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(self.nodes) * self.tasks_per_node


def allocate(
    environ: Mapping[str, str],
    *,
    job: str,
    batch: bool,
    nodes: Sequence[str],
    resources: Resources,
    procs: int | None = None,
    hosts: int | None = None,
    spare: int = 0,
    per_task: bool = True,
) -> Allocation:
    """One rank per GPU; where there is none, one per task that the job was submitted with.

    `procs` (slurm.procs, ranks per node) and `hosts` (slurm.hosts, nodes) win where given,
    `spare` (supervise.spare_nodes) of them are kept in reserve.
    `per_task` says that each task is to be a rank, and not the launcher of a node's ranks. Raises
    `ValueError` with a sentence if tasks and GPUs do not fit, or a number is more than there is.
    """
    if hosts is not None and hosts > len(nodes):
        raise ValueError(f"slurm.hosts={hosts}, but job {job} has {len(nodes)} nodes")
    used = (len(nodes) if hosts is None else hosts) - spare
    if used < 1:
        raise ValueError(f"supervise.spare_nodes={spare} leaves no node of job {job} to train on")
    gpus = resources.gpus.value or 0
    tasks = procs or (_tasks(environ, job, gpus) if per_task else max(1, gpus))
    return Allocation(
        job=job,
        nodes=tuple(nodes[:used]),
        spare=tuple(nodes[used : used + spare]),
        tasks_per_node=tasks,
        cpus_per_task=_cpus(environ, resources.cpus.value, tasks),
        gpus_per_node=gpus,
        batch=batch,
    )


def without(allocation: Allocation, gone: Collection[str]) -> Allocation:
    """The allocation without the nodes that are `gone`, spare ones in their place if there are."""
    left = [node for node in allocation.nodes if node not in gone]
    spare = [node for node in allocation.spare if node not in gone]
    missing = len(allocation.nodes) - len(left)
    nodes = (*left, *spare[:missing])
    return replace(allocation, nodes=nodes, spare=tuple(spare[missing:]))


def avoid(allocation: Allocation, suspect: Collection[str], at_least: int) -> Allocation:
    """The allocation with as few ranks on `suspect` nodes as can be.

    They become the last of the spare ones. Others take their place where there are any; where not,
    it becomes smaller, but keeps `at_least` nodes.
    """
    nodes = (*allocation.nodes, *allocation.spare)
    sound = [node for node in nodes if node not in suspect]
    by_worth = (*sound, *(node for node in nodes if node in suspect))
    wanted = len(allocation.nodes)
    used = min(wanted, max(len(sound), at_least))
    return replace(allocation, nodes=by_worth[:used], spare=by_worth[used:])


def _tasks(environ: Mapping[str, str], job: str, gpus: int) -> int:
    asked = environ.get("SLURM_NTASKS_PER_NODE")
    if asked is None:
        here = environ.get("SLURM_TASKS_PER_NODE")
        return gpus or (expand_counts(here)[0] if here else 1)
    if gpus and int(asked) != gpus:
        raise ValueError(
            f"job {job} has --ntasks-per-node={asked} but {gpus} GPUs per node, and each rank "
            f"drives one: submit with --ntasks-per-node={gpus}, or set slurm.procs"
        )
    return int(asked)


def _cpus(environ: Mapping[str, str], on_node: int | None, tasks: int) -> int | None:
    """srun ignores the SLURM_CPUS_PER_TASK of sbatch, and silently gives one CPU."""
    if asked := environ.get("SLURM_CPUS_PER_TASK"):
        return int(asked)
    return max(1, on_node // tasks) if on_node else None
