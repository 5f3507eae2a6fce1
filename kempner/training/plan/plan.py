"""What a run will need and how fast it will be, before it is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kempner.config.sections import Config
from kempner.model.spec.communication import (
    Choice,
    Traffic,
    ring_traffic,
    step_buffers,
    tensor_buffers,
)
from kempner.model.spec.communication_choice import USED, Situation, choose, usable_memory
from kempner.model.spec.flops import step_flops
from kempner.model.spec.hardware import DEFAULTS, Assumptions, Gpu, find_gpu
from kempner.model.spec.mesh import (
    MeshDegrees,
    check_tensor_degree,
    check_tensor_groups,
    ranks_on_a_node,
    resolve_degrees,
)
from kempner.model.spec.shape import Shape, flops_per_token
from kempner.model.spec.step_time import Load, StepTime, step_time
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.save_times import young_interval
from kempner.training.compute.communication import situation_of
from kempner.training.plan.advice import advise
from kempner.training.plan.timeline import Collective, Memory, Phase, Traced
from kempner.training.plan.trace import Step, traced


@dataclass(frozen=True)
class Exchange:
    """One kind of collective in a step.

    Attributes:
        collective: which, and along which dimension of the mesh.
        buffers: bytes of one rank's whole buffers, traced.
        traffic: bytes that each node sends for it, to its own ranks and to other nodes.
        seconds: that it takes by itself, at the rates that are taken to be reached.
    """

    collective: Collective
    buffers: int
    traffic: Traffic
    seconds: float


@dataclass(frozen=True)
class Saves:
    """Checkpoints: bytes of one, seconds to write it, for how many it holds up training; and the
    interval that loses least time, by Young's formula, in seconds and in steps.
    """

    bytes: int
    seconds: float
    pause: float
    interval: float
    interval_steps: int


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it is queued.

    Attributes:
        world, nodes, mesh: the ranks, and how they are divided.
        gpu: each rank's.
        choice: when ranks communicate, and why so.
        memory: of the rank that needs most, at the moment at which it does; bytes of tensors.
        limit: bytes of them that the GPU has room for, 0.9 of its memory.
        flops: that one rank computes in a step, traced.
        flops_by_formula: the same by `step_flops`.
        exchanges: what ranks send each other in a step.
        buffers_by_formula: bytes of the exchanges' buffers, by `step_buffers` and `tensor_buffers`.
        time: seconds of a step.
        tokens_per_second: of all ranks.
        mfu: model FLOPs utilisation, of the peak.
        saves: checkpoints.
        advice: what to change if it does not fit; empty if it does.
        notes: in what the trace differs from the run.
        assumptions: what was not traced.
    """

    world: int
    nodes: int
    mesh: MeshDegrees
    gpu: Gpu
    choice: Choice
    memory: Memory
    limit: int
    flops: int
    flops_by_formula: int
    exchanges: Sequence[Exchange]
    buffers_by_formula: int
    time: StepTime
    tokens_per_second: float
    mfu: float
    saves: Saves
    advice: str = ""
    notes: Sequence[str] = ()
    assumptions: Assumptions = field(default=DEFAULTS)

    @property
    def fits(self) -> bool:
        """Whether the GPU has room."""
        return self.memory.total <= self.limit


def plan(
    config: Config,
    world: int,
    nodes: int | None = None,
    gpu: str = "H100",
    *,
    vocab_size: int | None = None,
    assumptions: Assumptions = DEFAULTS,
) -> Plan:
    """Trace a training step of `world` ranks, and say what it needs and takes.

    Args:
        config: the run's configuration.
        world: number of ranks, one for each GPU.
        nodes: on which they are; by default as `slurm` says, or 8 ranks on each.
        gpu: name of one that `hardware.GPUS` knows.
        vocab_size: of the data, where the configuration does not say.
        assumptions: on what is not traced.

    Raises `UsageError` for a world that cannot be divided so, and for a model of the user's own.
    The process must not be part of a process group.
    """
    card, config, notes = find_gpu(gpu), _on_a_gpu(config), _notes(config)
    vocab_size = vocab_size or config.model.vocab_size
    if vocab_size is None:
        raise UsageError("model.vocab_size is not set, and no data says it: set it")
    mesh = resolve_degrees(config.parallelism, world)
    check_tensor_degree(config, vocab_size)
    per_node = ranks_on_a_node(config, world, nodes)
    check_tensor_groups([f"node {rank // per_node}" for rank in range(world)], mesh.tensor)
    bytes_per_number = 4 if config.train.dtype == "float32" else 2
    situation = situation_of(
        config, vocab_size, mesh, bytes_per_number, per_node, usable_memory(card.memory)
    )
    choice = choose(config, situation)
    step = Step(config, vocab_size, mesh, choice, situation.micro_batches, fused_norms=True)
    found = traced(step)
    time = step_time([_load(phase, mesh, per_node) for phase in found.phases], card, assumptions)
    tokens = config.train.global_batch_size * config.train.seq_len
    shape = Shape.of(config.model, vocab_size)
    needed = flops_per_token(shape, config.train.seq_len) * tokens
    limit = int(USED * usable_memory(card.memory))
    return Plan(
        world=world,
        nodes=world // per_node,
        mesh=mesh,
        gpu=card,
        choice=choice,
        memory=found.memory,
        limit=limit,
        flops=found.flops,
        flops_by_formula=_flops_by_formula(config, shape, situation),
        exchanges=_exchanges(found, mesh, per_node, card, assumptions),
        buffers_by_formula=_buffers_by_formula(config, shape, situation, choice),
        time=time,
        tokens_per_second=tokens / time.total,
        mfu=needed / (time.total * world * card.flops),
        saves=_saves(config, found, world, world // per_node, time.total, assumptions),
        advice=advise(config, mesh, choice, found.memory, limit),
        notes=notes,
        assumptions=assumptions,
    )


def _on_a_gpu(config: Config) -> Config:
    """With the compute type that "auto" is on a GPU, and without what fake tensors cannot do."""
    if config.model.factory is not None:
        raise UsageError(
            f"what model.factory={config.model.factory} computes is not known before it is called; "
            "kempner plan knows kempner's own models only"
        )
    dtype = "bfloat16" if config.train.dtype == "auto" else config.train.dtype
    changes = {"dtype": dtype, "fp8": False}
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def _notes(config: Config) -> list[str]:
    notes = []
    if config.train.fp8:
        notes.append("fp8 is traced as bfloat16: with it, the blocks' products take less time")
    if config.train.compile:
        notes.append(
            "compiled blocks are traced as they are written: fused kernels keep no more and move "
            "less, so that the run will need less memory and time"
        )
    if config.data.document_mask:
        notes.append("document masks are traced as plain causal attention, which computes more")
    return notes


def _flops_by_formula(config: Config, shape: Shape, situation: Situation) -> int:
    sequences = situation.micro_batches * config.train.micro_batch_size
    return step_flops(shape, config.train, sequences, situation.mesh.tensor)


def _buffers_by_formula(config: Config, shape: Shape, situation: Situation, choice: Choice) -> int:
    mesh, train = situation.mesh, config.train
    number, size = situation.micro_batches, situation.compute_bytes
    of_data = step_buffers(shape, mesh, choice, micro_batches=number, compute_bytes=size)
    total = of_data.all_gather + of_data.reduce_scatter + of_data.all_reduce
    if mesh.tensor == 1:
        return total
    every = train.activation_checkpointing_every or 1
    recomputed = 0 if train.activation_checkpointing == "none" else -(-shape.n_layers // every)
    of_groups = tensor_buffers(
        shape,
        choice,
        micro_batches=number,
        tokens=train.micro_batch_size * train.seq_len,
        compute_bytes=size,
        recomputed_blocks=recomputed,
    )
    return total + of_groups.sequence + of_groups.all_reduce


def _traffic(collective: Collective, size: int, mesh: MeshDegrees, per_node: int) -> Traffic:
    passes = 2 if collective.operation == "all_reduce" else 1
    return ring_traffic(passes * size, collective.dimension, mesh, per_node)


def _load(phase: Phase, mesh: MeshDegrees, per_node: int) -> Load:
    within = between = waited = 0.0
    for collective, size in phase.sent.items():
        traffic = _traffic(collective, size, mesh, per_node)
        if collective.dimension == "tensor":
            waited += traffic.within / per_node
        else:
            within += traffic.within / per_node
            between += traffic.between
    operations = [(flops, size, number) for (flops, size), number in phase.work.items()]
    return Load(phase.times, operations, within, between, waited)


def _exchanges(
    found: Traced, mesh: MeshDegrees, per_node: int, gpu: Gpu, given: Assumptions
) -> list[Exchange]:
    listed = []
    for collective, size in found.sent.items():
        traffic = _traffic(collective, size, mesh, per_node)
        inside = traffic.within / per_node / gpu.link_rate
        seconds = max(inside, traffic.between / given.network) / given.network_share
        listed.append(Exchange(collective, size, traffic, seconds))
    return sorted(listed, key=lambda exchange: -exchange.seconds)


def _saves(
    config: Config,
    found: Traced,
    world: int,
    nodes: int,
    step_seconds: float,
    assumptions: Assumptions,
) -> Saves:
    seconds = found.state / assumptions.storage
    copied = found.state / world / assumptions.to_host
    pause = copied if config.checkpoint.async_save else copied + seconds
    young = young_interval(pause, assumptions.node_failure / nodes)
    # One that begins before the last is durable gains nothing.
    interval = max(young, seconds)
    return Saves(found.state, seconds, pause, interval, max(1, round(interval / step_seconds)))
