"""Whether there are as many ranks as GPUs, and whether the mesh and the model fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kempner.config.errors import ConfigError
from kempner.config.fault_spec import refuse_absent_ranks
from kempner.config.sections import Config
from kempner.data.order.batch_slices import micro_steps
from kempner.insight.doctor.facts.node import NodeAnswer
from kempner.insight.doctor.finding import (
    Finding,
    Outcome,
    fail,
    finding,
    passed,
    per_node,
    skipped,
    warn,
)
from kempner.model.spec.communication_choice import Situation, choose, needed_memory, usable_memory
from kempner.model.spec.mesh import check_tensor_degree, resolve_degrees
from kempner.model.spec.shape import Shape
from kempner.run.output.units import count, size_text
from kempner.run.process.exit_codes import UsageError


@dataclass(frozen=True)
class World:
    """The ranks of the run that is to be: on how many nodes, how many on each, `gpus` that the job
    gives to a node (None where nobody says), and who says all that."""

    nodes: int
    per_node: int
    gpus: int | None
    source: str
    in_job: bool = False
    """Whether the nodes that are asked are those of the run."""

    @property
    def size(self) -> int:
        """All ranks."""
        return self.nodes * self.per_node

    @property
    def words(self) -> str:
        """For a sentence."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{count(self.size, 'rank')}{nodes} ({self.source})"


def check_mesh(config: Config, world: World, vocab_size: int | None) -> Outcome:
    """Whether the ranks make the mesh that is configured, and the mesh cuts the model evenly."""
    try:
        refuse_absent_ranks(config.resilience.faults, world.size)
        mesh = resolve_degrees(config.parallelism, world.size)
        if vocab_size is not None and config.model.factory is None:
            check_tensor_degree(config, vocab_size)
    except (ConfigError, UsageError) as error:
        return fail(str(error))
    if world.per_node % mesh.tensor:
        return fail(
            f"parallelism.tensor_parallel_degree={mesh.tensor} does not divide the "
            f"{world.per_node} ranks of a node, so that a tensor group would span nodes; lower it, "
            "or start a multiple of it per node"
        )
    batch = config.train.global_batch_size
    if batch < mesh.data_world:
        return warn(
            f"train.global_batch_size={batch} gives only {batch} of {mesh.data_world} data "
            "parallel ranks a sequence per step; raise it, or start fewer ranks"
        )
    return passed(f"{world.words}: {mesh}")


def check_ranks(world: World, answers: Sequence[NodeAnswer], hidden: bool) -> list[Finding]:
    """Ranks per node against the GPUs that the job gives and that each node really has.

    `hidden` says that the nodes could not be asked about those of the job.
    """
    check = "ranks and GPUs"
    if hidden:
        why = "srun starts no short step with the job's GPUs, so that they cannot be looked at"
        return [finding(check, skipped(why))]
    if world.gpus and world.per_node != world.gpus:
        return [
            finding(
                check,
                fail(
                    f"{world.source} asks for {world.gpus} GPUs and {world.per_node} tasks per "
                    f"node, and each rank drives one GPU: set --ntasks-per-node={world.gpus}"
                ),
            )
        ]
    return per_node(check, answers, lambda a: a.node, lambda a: _ranks_here(world, a))


def _ranks_here(world: World, answer: NodeAnswer) -> Outcome:
    survey, software = answer.gpus, answer.software
    there = max(len(survey.gpus), software.devices)
    if survey.trouble:
        return fail(f"{survey.trouble}; ask the administrators to look at the node")
    if not there:
        if world.in_job and world.gpus:
            return fail(
                f"the job has {world.gpus} GPUs per node, and neither nvidia-smi nor torch sees "
                "one: exclude the node, or install a torch for its GPUs"
            )
        where = "here" if not world.in_job else "on the nodes"
        return skipped(f"there is no GPU {where}: {world.words} on CPUs")
    if not software.devices and not software.trouble:
        built = f"is built for CUDA {software.cuda}" if software.cuda else "is built for CPUs alone"
        return fail(
            f"torch {software.torch} {built} and cannot use the {there} GPUs of the node (driver "
            f"{survey.driver or 'unknown'}): install a torch that fits the driver"
        )
    if world.per_node > there and (world.in_job or world.gpus is None):
        return fail(
            f"{world.per_node} ranks per node for {there} GPUs: start {there} per node "
            "(--ntasks-per-node, slurm.procs or --nproc)"
        )
    if world.per_node < there and world.in_job:
        return warn(f"{there - world.per_node} of {there} GPUs would have no rank; start {there}")
    return passed(f"{count(world.per_node, 'rank')} per node, {count(there, 'GPU')}")


def check_gpu_memory(
    config: Config, world: World, vocab_size: int | None, answers: Sequence[NodeAnswer]
) -> list[Finding]:
    """Whether what a rank needs, as estimated, is on its GPU; nothing where there are none."""
    sizes = {gpu.memory_total for answer in answers for gpu in answer.gpus.gpus}
    smallest = min(sizes, default=0)
    if not smallest or vocab_size is None or config.model.factory is not None:
        return []
    try:
        mesh = resolve_degrees(config.parallelism, world.size)
    except UsageError:
        return []
    train, shape = config.train, Shape.of(config.model, vocab_size)
    situation = Situation(
        shape,
        mesh,
        world.per_node,
        micro_steps(train.global_batch_size, mesh.data_world, train.micro_batch_size),
        compute_bytes=4 if train.dtype == "float32" else 2,
        gpu_memory=usable_memory(smallest),
    )
    needed = needed_memory(config, situation, shape, choose(config, situation)).total
    numbers = f"a rank needs about {size_text(needed)}, the smallest GPU has {size_text(smallest)}"
    if needed > smallest:
        return [
            finding(
                "GPU memory",
                fail(
                    f"{numbers}: lower train.micro_batch_size, set "
                    'train.activation_checkpointing="full", or start more ranks'
                ),
            )
        ]
    return [finding("GPU memory", passed(numbers))]
