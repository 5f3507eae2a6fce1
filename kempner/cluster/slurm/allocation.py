"""The part of a Slurm job that the ranks use: nodes, tasks per node, CPUs per task."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kempner.cluster.slurm.hostlist import expand_counts
from kempner.cluster.slurm.job import NodeShare, gpus_by_node
from kempner.cluster.slurm.resources import CONFIGURED_GPUS, NodeResources

_BY_NODE = "24.11"
"""The first version in which --gpus-per-node works for a step on one of several unequal nodes."""


@dataclass(frozen=True)
class Allocation:
    """The part of a job in which the ranks run. `job` is its Slurm id. `batch`: this process is the
    job's batch process; else the job is a user's `salloc`, in which other programs may run.
    `cpus_per_task` is None if not set, and 0 if a node has fewer CPUs than ranks. `spare` nodes get
    ranks only when another is lost. `uneven` has the GPUs, and so the ranks, of each node if nodes
    differ."""

    job: str
    nodes: tuple[str, ...]
    tasks_per_node: int
    cpus_per_task: int | None
    gpus_per_node: int
    batch: bool
    spare: tuple[str, ...] = ()
    uneven: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(map(self.ranks_on, self.nodes))

    def ranks_on(self, node: str) -> int:
        return self.uneven.get(node, self.tasks_per_node)

    def gpus_on(self, node: str) -> int:
        return self.uneven.get(node, self.gpus_per_node)

    def places(self) -> dict[str, range]:
        first, places = 0, {}
        for node in self.nodes:
            places[node] = range(first, first + self.ranks_on(node))
            first = places[node].stop
        return places

    def steps(self, nodes: Sequence[str]) -> list[list[str]]:
        """Group nodes into as few steps as possible in which Slurm gives ranks all GPUs."""
        if self.uneven:
            return [[node] for node in nodes]
        return [list(nodes)] if nodes else []

    def gpu_options(self, nodes: Sequence[str], slurm: str) -> tuple[str, ...]:
        """srun's options for a step with all GPUs of these nodes; `slurm` is its version.

        Without them, a step in a job that requested GPUs per task or in total gets another number.
        If nodes differ, a step on several of them gets no GPUs; on a single one, Slurm 22.05
        refuses --gpus-per-node, and in 24.11 --gpus waits for ever."""
        if not (gpus := self.gpus_on(nodes[0])):
            return ()
        in_all = self.uneven and "" < slurm < _BY_NODE
        return (f"--gpus={gpus}" if in_all else f"--gpus-per-node={gpus}",)

    @property
    def why_no_tasks(self) -> str:
        """Why Slurm cannot start all ranks as tasks of one step; empty if it can. A step gets the
        same number of GPUs on every node, and tasks are placed by CPUs (Slurm 22.05)."""
        if self.uneven:
            counts = ", ".join(map(str, sorted(set(self.uneven.values()), reverse=True)))
            return f"its nodes have different numbers of GPUs ({counts})"
        return "a node has fewer CPUs than ranks" if self.cpus_per_task == 0 else ""


def _used(nodes: int, job: str, hosts: int | None, spare: int) -> int:
    """The number of nodes with ranks. Raises `ValueError` if the job has too few."""
    if hosts is not None and hosts > nodes:
        raise ValueError(f"slurm.hosts={hosts}, but job {job} has {nodes} nodes")
    used = (nodes if hosts is None else hosts) - spare
    if used < 1:
        raise ValueError(f"supervise.spare_nodes={spare} leaves no node of job {job} to train on")
    return used


def allocate(
    environ: Mapping[str, str],
    *,
    job: str,
    batch: bool,
    nodes: Sequence[str],
    resources: NodeResources,
    procs: int | None = None,
    hosts: int | None = None,
    spare: int = 0,
    per_task: bool = True,
    shares: Mapping[str, NodeShare] | None = None,
) -> Allocation:
    """The allocation with one rank per GPU or, without GPUs, one per task of the submission.

    `procs` (slurm.procs, ranks per node) and `hosts` (slurm.hosts, nodes) take precedence; `spare`
    nodes (supervise.spare_nodes) are kept in reserve. `per_task`: each task is a rank, not the
    launcher of a node's ranks. `shares` are the job's parts of each node, if known. Raises
    `ValueError` with a sentence if tasks and GPUs do not match, or if a number is too large."""
    shares, used = shares or {}, _used(len(nodes), job, hosts, spare)
    found = gpus_by_node(shares, nodes[: used + spare])
    if not any(found.values()) or resources.gpus.source == CONFIGURED_GPUS:
        found = dict.fromkeys(nodes, resources.gpus.value or 0)
    gpus, uneven = min(found.values()), len(set(found.values())) > 1 and procs is None
    if uneven:
        _check_uneven(environ, job, found, per_task)
        gpus = max(found.values())
    tasks = procs or (_tasks(environ, job, gpus) if per_task else max(1, gpus))
    return Allocation(
        job=job,
        nodes=tuple(nodes[:used]),
        spare=tuple(nodes[used : used + spare]),
        tasks_per_node=tasks,
        cpus_per_task=_cpus(environ, resources.cpus.value, tasks, shares),
        gpus_per_node=gpus,
        batch=batch,
        uneven=found if uneven else {},
    )


def without(allocation: Allocation, gone: Collection[str]) -> Allocation:
    left = [node for node in allocation.nodes if node not in gone]
    spare = [node for node in allocation.spare if node not in gone]
    missing = len(allocation.nodes) - len(left)
    nodes = (*left, *spare[:missing])
    return replace(allocation, nodes=nodes, spare=tuple(spare[missing:]))


def avoid(
    allocation: Allocation, suspect: Collection[str], at_least: int, wanted: int | None = None
) -> Allocation:
    """The allocation with as few ranks on `suspect` nodes as possible; they become the last spare
    nodes. It has `wanted` nodes (default: its present number) if enough are not suspect, else
    fewer, but `at_least` that many."""
    nodes = (*allocation.nodes, *allocation.spare)
    sound = [node for node in nodes if node not in suspect]
    by_worth = (*sound, *(node for node in nodes if node in suspect))
    wanted = len(allocation.nodes) if wanted is None else wanted
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


def _check_uneven(
    environ: Mapping[str, str], job: str, gpus: Mapping[str, int], per_task: bool
) -> None:
    shown = ", ".join(f"{node} has {count}" for node, count in gpus.items())
    remedy = "submit with --gpus-per-node, or set slurm.procs"
    if not per_task:
        raise ValueError(f"torchrun needs as many GPUs on every node, but {shown}: {remedy}")
    if min(gpus.values()) == 0:
        raise ValueError(f"job {job} has no GPU on some of its nodes ({shown}): {remedy}")
    if asked := environ.get("SLURM_NTASKS_PER_NODE"):
        raise ValueError(
            f"job {job} has --ntasks-per-node={asked}, but {shown}, and each rank drives one: "
            "leave --ntasks-per-node out, or set slurm.procs"
        )


def _cpus(
    environ: Mapping[str, str],
    on_node: int | None,
    tasks: int,
    shares: Mapping[str, NodeShare],
) -> int | None:
    """CPUs for each of the `tasks` on a node; srun ignores sbatch's SLURM_CPUS_PER_TASK and
    silently gives one CPU. That number is per task of the submission, and with torchrun one task
    starts all ranks of a node."""
    counts = [share.cpus for share in shares.values()] + ([on_node] if on_node else [])
    fair = min(counts) // tasks if counts else None
    asked = environ.get("SLURM_CPUS_PER_TASK")
    if asked is None:
        return fair
    return int(asked) if fair is None else min(int(asked), fair)
