"""Whether the job fits: Slurm's limits, the ranks and the mesh, and the time of a save."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kempner.config.errors import ConfigError
from kempner.config.resilience import refuse_absent_ranks
from kempner.config.sections import Config
from kempner.data.order.batch_slices import micro_steps
from kempner.insight.doctor.facts.slurm import JobPlan, SlurmFacts
from kempner.insight.doctor.finding import (
    CheckOutcome,
    Finding,
    fail,
    finding,
    passed,
    per_node,
    skipped,
    warn,
)
from kempner.model.spec.memory import Situation, choose, estimate_memory, usable_memory
from kempner.model.spec.mesh import check_tensor_degree, resolve_degrees
from kempner.model.spec.shape import Shape
from kempner.probe.node import ProbeResult
from kempner.run.output.units import count, size_text
from kempner.run.process.exit_codes import UsageError


@dataclass(frozen=True)
class JobFacts:
    """Whether the job may be requeued, and its time limit in seconds; None if that is unknown."""

    may_requeue: bool | None
    limit: float | None
    batch: bool = True


def check_slurm(slurm: SlurmFacts | None, used: bool) -> CheckOutcome:
    """Whether controller and accounting answer; `used`: the run will be a Slurm job."""
    if slurm is None:
        if used:
            return fail("there is no Slurm on this host: submit from a login node of the cluster")
        return skipped("there is no Slurm on this host")
    if slurm.controller:
        if not used:
            return skipped(
                "Slurm does not answer here, and the run is taken for one of this machine: name "
                "its batch script with --script if it is a job"
            )
        return fail(f"{slurm.controller}: see `scontrol ping`, and start again when it answers")
    if slurm.accounting:
        return warn(
            f"the accounting does not answer ({slurm.accounting}): slurm.resubmit and `kempner "
            "status` need it"
        )
    return passed("the controller and the accounting answer")


def check_requeue(job: JobFacts, plan: JobPlan | None, resubmit: bool) -> CheckOutcome:
    if not job.batch:
        return skipped("the allocation is interactive: it ends with its time")
    if job.may_requeue is None and plan is None:
        return skipped("no batch script is known: name it with --script")
    if job.may_requeue is None:
        return skipped("the cluster's JobRequeue decides: `#SBATCH --requeue` makes sure of it")
    if job.may_requeue:
        return passed("the job may be requeued")
    if resubmit:
        return passed("the job may not be requeued, and slurm.resubmit submits it again")
    where = "the job" if plan is None else plan.source
    return warn(
        f"{where} may not be requeued, so that the run ends with it: write `#SBATCH --requeue`, or "
        "set slurm.resubmit=true"
    )


def check_time(slurm: SlurmFacts | None, limit: float | None) -> CheckOutcome:
    partition = None if slurm is None else slurm.partition
    if slurm is not None and slurm.no_partition:
        return fail(f"the partition cannot be used: {slurm.no_partition}; correct --partition")
    if partition is None:
        return skipped("no partition is named")
    if not partition.up:
        return fail(f"partition {partition.name} is not up: a job would wait; choose another one")
    if limit is not None and partition.longest is not None and limit > partition.longest:
        return fail(
            f"--time asks for {limit / 3600:.1f} h, and partition {partition.name} gives "
            f"{partition.longest / 3600:.1f} h: the job would wait for ever; ask for less"
        )
    return passed(f"partition {partition.name} is up")


@dataclass(frozen=True)
class PlannedWorld:
    """The planned number of nodes, of ranks per node, of `gpus` that the job gets on a node (None
    if unknown), and the source of these numbers."""

    nodes: int
    per_node: int
    gpus: int | None
    source: str
    in_job: bool = False  # whether the probed nodes are those of the run

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def words(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{count(self.size, 'rank')}{nodes} ({self.source})"


def check_mesh(config: Config, world: PlannedWorld, vocab_size: int | None) -> CheckOutcome:
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


def check_ranks(world: PlannedWorld, answers: Sequence[ProbeResult], hidden: bool) -> list[Finding]:
    """Compare the ranks per node with the GPUs that the job gets, and that each node has. `hidden`:
    the job's GPUs could not be examined."""
    check = "ranks and GPUs"
    if hidden:
        why = "srun starts no short step with the job's GPUs, so that they cannot be looked at"
        return [finding(check, skipped(why))]
    if world.gpus and world.per_node != world.gpus:
        sentence = (
            f"{world.source} asks for {world.gpus} GPUs and {world.per_node} tasks per node, and "
            f"each rank drives one GPU: set --ntasks-per-node={world.gpus}"
        )
        return [finding(check, fail(sentence))]
    return per_node(check, answers, lambda a: _ranks_here(world, a))


def _ranks_here(world: PlannedWorld, answer: ProbeResult) -> CheckOutcome:
    survey, software = answer.details.gpus, answer.details.software
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
    config: Config, world: PlannedWorld, vocab_size: int | None, answers: Sequence[ProbeResult]
) -> list[Finding]:
    sizes = {gpu.memory_total for answer in answers for gpu in answer.details.gpus.gpus}
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
    needed = estimate_memory(
        config, shape, mesh, situation.compute_bytes, choose(config, situation)
    ).total
    numbers = f"a rank needs about {size_text(needed)}, the smallest GPU has {size_text(smallest)}"
    advice = (
        'lower train.micro_batch_size, set train.activation_checkpointing="full", or start more '
        "ranks"
    )
    outcome = fail(f"{numbers}: {advice}") if needed > smallest else passed(numbers)
    return [finding("GPU memory", outcome)]


Lead = Callable[[float], float]
"""Maps the seconds of a save to the seconds before a job's end at which a stop must begin."""

_GRAIN = 30  # seconds to which a warning is rounded up: Slurm checks its clock no more often
_MOST_OF_JOB = 0.5  # largest share of a job's time that kempner keeps free for its end


@dataclass(frozen=True)
class SaveTime:
    """The predicted `seconds` of a save, None if unknown; `sentence` says more."""

    seconds: float | None
    sentence: str


def predict_save(
    size: int | None, answers: Sequence[ProbeResult], nodes: int, measured_on_all: bool
) -> SaveTime:
    """Predict the save of a checkpoint of `size` bytes from the rates of the write tests. Unless
    all `nodes` wrote at once (`measured_on_all`), each is assumed to have this host's rate."""
    tests = [answer.details.write for answer in answers if answer.details.write is not None]
    rates = [test.rate for test in tests if test.rate is not None]
    if size is None:
        return SaveTime(None, "the size of a checkpoint is not known")
    if not rates:
        return SaveTime(None, "the write test was left out")
    together = sum(rates) if measured_on_all else rates[0] * nodes
    seconds = size / together
    how = f"{_rate(together)} measured on {len(rates)} nodes at once"
    if not measured_on_all or len(rates) == 1:
        how = f"{_rate(rates[0])} measured here"
        if nodes > 1:
            how += f", if storage takes as much from each of {nodes} nodes (--allocation measures)"
    return SaveTime(seconds, f"a checkpoint of {size_text(size)} takes about {_s(seconds)} ({how})")


def check_write(answers: Sequence[ProbeResult], save: SaveTime) -> CheckOutcome:
    for answer in answers:
        test = answer.details.write
        if test is not None and test.trouble:
            return fail(
                f"the checkpoints' folder cannot be written on {answer.node}: {test.trouble}; free "
                "space there, or set checkpoint.dir"
            )
    if save.seconds is None:
        return skipped(save.sentence)
    return passed(save.sentence)


def check_window(
    plan: JobPlan | None, limit: float | None, save: SaveTime, lead: Lead
) -> CheckOutcome:
    """Whether a stop and its save fit between Slurm's warning and the job's end.

    `limit` is the job's whole time in seconds, None without one.
    """
    if plan is None:
        return skipped("no batch script is known: name it with --script")
    if save.seconds is None:
        return skipped(f"not compared: {save.sentence}")
    needed = lead(save.seconds)
    advised = _GRAIN * math.ceil(max(needed, 4 * _GRAIN) / _GRAIN)
    line = f"#SBATCH --signal=B:SIGTERM@{advised}"
    if limit is not None and needed > _MOST_OF_JOB * limit:
        return fail(
            f"a stop with its saves takes {_s(needed)}, and the job has {_s(limit)}: ask for more "
            "time (--time), or write to faster storage (checkpoint.dir)"
        )
    warning = plan.warning
    if warning is None:
        return warn(f"{plan.source} asks for no warning before the time limit: add `{line}`")
    if limit is not None and warning.seconds >= limit:
        return fail(
            f"the warning comes {_s(warning.seconds)} before the end, and the job has {_s(limit)}: "
            f"it would stop as it begins; write `{line}`, or ask for more time"
        )
    if not warning.to_script:
        return warn(
            f"--signal={warning.signal}@{warning.seconds:.0f} of {plan.source} does not reach the "
            f"batch script, where the supervisor is: write `{line}`"
        )
    if warning.seconds < needed:
        return warn(
            f"the warning comes {_s(warning.seconds)} before the end, and a stop with its saves "
            f"takes {_s(needed)}: write `{line}`"
        )
    return passed(f"a warning of {_s(warning.seconds)}, of which a stop takes about {_s(needed)}")


def check_grace(slurm: SlurmFacts, save: SaveTime) -> CheckOutcome:
    partition = slurm.partition
    if partition is None:
        return skipped(slurm.no_partition or "no partition is known")
    if partition.grace is None:
        return passed(f"jobs of partition {partition.name} are not preempted")
    if save.seconds is None:
        return skipped(f"not compared: {save.sentence}")
    left = partition.grace + slurm.kill_wait
    numbers = f"a preemption in partition {partition.name} leaves {_s(left)}"
    if save.seconds > left:
        return warn(
            f"{numbers}, and a save takes {_s(save.seconds)}: what was trained since the last "
            "checkpoint would be lost; lower checkpoint.interval, or use a partition with a longer "
            "GraceTime"
        )
    return passed(f"{numbers}, a save takes {_s(save.seconds)}")


def _rate(rate: float) -> str:
    return f"{rate / 1e6:,.1f} MB/s"


def _s(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
