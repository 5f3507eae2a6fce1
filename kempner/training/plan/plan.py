"""Plans a run before it is queued: its memory and speed, what to change if it does not fit or
mostly waits; as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kempner.config.sections import Config
from kempner.model.spec.adapter import Adapter
from kempner.model.spec.communication import (
    Choice,
    Traffic,
    all_to_all_traffic,
    ring_traffic,
)
from kempner.model.spec.memory import (
    USED,
    Situation,
    buffers_of_step,
    choose,
    slot_buffers_of_step,
    usable_memory,
)
from kempner.model.spec.mesh import (
    MeshDegrees,
    check_tensor_degree,
    check_tensor_groups,
    ranks_on_a_node,
    resolve_degrees,
)
from kempner.model.spec.shape import Shape, flops_per_token
from kempner.model.spec.step_time import (
    DEFAULTS,
    Assumptions,
    GpuModel,
    Load,
    StepTime,
    find_gpu,
    step_flops,
    step_time,
)
from kempner.run.output.units import count, flops_text, seconds_text, size_text
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.save_times import young_interval
from kempner.training.compute.forward_backward import situation_of
from kempner.training.plan.timeline import KINDS, Collective, PeakMemory, StepPhase, TracedStep
from kempner.training.plan.trace import Step, traced


def advise(
    config: Config, mesh: MeshDegrees, choice: Choice, memory: PeakMemory, limit: int
) -> str:
    """A sentence: by how much it does not fit, what takes most, and what to change first; empty if
    it fits. The cheapest change comes first: settings back to their default, then memory for time,
    then more GPUs."""
    if memory.total <= limit:
        return ""
    most = max(KINDS, key=lambda kind: getattr(memory, kind))
    what = next(_remedies(config, mesh, choice, memory))
    too_much = size_text(memory.total - limit)
    return (
        f"{size_text(memory.total)} are {too_much} more than there is room for; most of it, "
        f"{size_text(getattr(memory, most))}, is for {most}: {what}"
    )


def communication_advice(config: Config, choice: Choice, time: StepTime) -> str:
    """What to change if ranks wait for each other more than they compute; else empty."""
    if time.bound not in ("within_node", "between_nodes"):
        return ""
    if not (choice.reduce_once and choice.keep_parameters):
        return (
            "to send less, make room for what is kept for a step (reduce_gradients, "
            "reshard_after_forward): by train.activation_checkpointing or larger GPUs"
        )
    return f"to send less often, raise train.global_batch_size={config.train.global_batch_size}"


def _remedies(
    config: Config, mesh: MeshDegrees, choice: Choice, memory: PeakMemory
) -> Iterator[str]:
    train = config.train
    if choice.keep_parameters and mesh.data_world > 1:
        yield 'set parallelism.reshard_after_forward="always"'
    if choice.reduce_once and mesh.data_world > 1:
        yield 'set parallelism.reduce_gradients="micro_batch"'
    if train.loss_chunk == 0:
        yield "set train.loss_chunk=1024"
    state = memory.parameters + memory.gradients + memory.optimizer
    if memory.activations + memory.backward + memory.loss >= state:
        if train.micro_batch_size > 1:
            yield f"lower train.micro_batch_size={train.micro_batch_size}"
        if train.activation_checkpointing == "none":
            yield 'set train.activation_checkpointing="selective", or "full"'
        if train.activation_checkpointing_every is not None:
            yield "remove train.activation_checkpointing_every"
        if train.activation_checkpointing == "selective":
            yield 'set train.activation_checkpointing="full"'
        yield (
            f"set parallelism.tensor_parallel_degree={2 * mesh.tensor}, or lower "
            f"train.seq_len={train.seq_len}"
        )
    if mesh.replicate > 1:
        yield "shard over all ranks: set parallelism.data_parallel_replicate_degree=1"
    yield "start more ranks, over which the state is sharded, or take larger GPUs"


@dataclass(frozen=True)
class Exchange:
    """One kind of collective in a step.

    Attributes:
        collective: which, and along which dimension of the mesh.
        buffers: bytes of one rank's whole buffers, traced.
        traffic: bytes that each node sends for it, to its own ranks and to other nodes.
        seconds: its duration alone, at the assumed rates.
    """

    collective: Collective
    buffers: int
    traffic: Traffic
    seconds: float


@dataclass(frozen=True)
class PlannedSaves:
    """Checkpoints: bytes of one, `seconds` to write it, `pause` seconds that it holds up training,
    and the optimal interval by Young's formula, in seconds and in steps."""

    bytes: int
    seconds: float
    pause: float
    interval: float
    interval_steps: int


@dataclass(frozen=True)
class TrainingJob:
    """`world` ranks on `nodes`, each with a GPU; when they communicate (`choice`), and the
    assumptions about the machines."""

    world: int
    nodes: int
    mesh: MeshDegrees
    gpu: GpuModel
    choice: Choice
    assumptions: Assumptions

    @property
    def ranks_per_node(self) -> int:
        return self.world // self.nodes


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of the rank that needs most, in bytes of tensors; the `limit`, 0.9 of a GPU's
    memory; what to change if that is not enough."""

    memory: PeakMemory
    limit: int
    advice: str = ""


@dataclass(frozen=True)
class Count:
    """A number from the traced step, and from a formula."""

    traced: int
    by_formula: int


@dataclass(frozen=True)
class Speed:
    """Seconds of a step by part, tokens per second of all ranks, model FLOPs utilization, and what
    to change if ranks mostly wait for each other."""

    time: StepTime
    tokens_per_second: float
    mfu: float
    hint: str = ""


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        job: the ranks.
        room: memory of a rank.
        flops: of one rank in the forwards and backwards of a step.
        sent: bytes of all buffers of one rank's collectives in a step, without Muon's updates.
        exchanges: these collectives, the slowest first.
        speed: of a step.
        saves: checkpoints.
        notes: differences between the trace and the run.
    """

    job: TrainingJob
    room: RankMemory
    flops: Count
    sent: Count
    exchanges: Sequence[Exchange]
    speed: Speed
    saves: PlannedSaves
    notes: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        return self.room.memory.total <= self.room.limit


def plan(
    config: Config,
    world: int,
    nodes: int | None = None,
    gpu: str = "H100",
    *,
    vocab_size: int | None = None,
    assumptions: Assumptions = DEFAULTS,
) -> Plan:
    """Trace a training step of `world` ranks, and compute its memory and time.

    There is one rank per GPU, `gpu` of `step_time.GPUS`, on `nodes` nodes; by default as in
    `slurm`, or 8 ranks on each. `vocab_size` is the data's, if not configured; `assumptions` cover
    what is not traced. Raises `UsageError` for a world that cannot be divided so, and for a user's
    own model. The process must not be part of a process group.
    """
    notes, config = _notes(config), _on_a_gpu(config)
    vocab_size = vocab_size or config.model.vocab_size
    if vocab_size is None:
        raise UsageError("model.vocab_size is not set, and no data says it: set it")
    situation = _situation(config, vocab_size, world, nodes, card := find_gpu(gpu))
    mesh, per_node, choice = situation.mesh, situation.ranks_per_node, choose(config, situation)
    job = TrainingJob(world, world // per_node, mesh, card, choice, assumptions)
    step = Step(config, vocab_size, mesh, choice, situation.micro_batches, as_on_gpu=True)
    found, shape = traced(step), Shape.of(config.model, vocab_size)
    speed = _speed(config, shape, found, job)
    limit = int(USED * usable_memory(card.memory))
    exchanges = _exchanges(found, job)
    return Plan(
        job=job,
        room=RankMemory(found.memory, limit, advise(config, mesh, choice, found.memory, limit)),
        flops=Count(found.flops, _flops_by_formula(config, shape, situation)),
        sent=Count(_sent(step, exchanges), _buffers_by_formula(step, shape, situation)),
        exchanges=exchanges,
        speed=speed,
        saves=_saves(config, found, job, speed.time.total),
        notes=notes,
    )


def _situation(
    config: Config, vocab_size: int, world: int, nodes: int | None, gpu: GpuModel
) -> Situation:
    mesh = resolve_degrees(config.parallelism, world)
    check_tensor_degree(config, vocab_size)
    per_node = ranks_on_a_node(config, world, nodes)
    check_tensor_groups([f"node {rank // per_node}" for rank in range(world)], mesh.tensor)
    compute_bytes = 4 if config.train.dtype == "float32" else 2
    memory = usable_memory(gpu.memory)
    return situation_of(config, vocab_size, mesh, compute_bytes, per_node, memory)


def _on_a_gpu(config: Config) -> Config:
    """The configuration with the compute type of a GPU, and without what fake tensors do not
    support."""
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
    if config.integrity.recompute_interval is not None:
        notes.append("a step is traced that is not checked: kempner config check counts a check")
    if config.train.fp8:
        notes.append("fp8 is traced as bfloat16: with it, the blocks' products take less time")
    if config.train.compile:
        notes.append(
            "compiled blocks are traced as written; fused kernels usually keep and move less"
        )
    if config.data.document_mask or config.preferences.on:
        notes.append(
            "of document masks it is traced what they take; attention is that of one document, "
            "which computes more"
        )
    return notes


def _flops_by_formula(config: Config, shape: Shape, situation: Situation) -> int:
    sequences = situation.micro_batches * config.train.micro_batch_size
    adapter = Adapter.of(config.adapter)
    pairs = config.preferences.on
    return step_flops(shape, config.train, sequences, situation.mesh.tensor, adapter, pairs)


def _sent(step: Step, exchanges: Sequence[Exchange]) -> int:
    """Bytes of the buffers that there is a formula for: not for Muon's updates, and not for the few
    numbers that are summed with slots."""
    left_out = "all_reduce" if step.slots else "all_to_all"
    return sum(e.buffers for e in exchanges if e.collective.operation != left_out)


def _buffers_by_formula(step: Step, shape: Shape, situation: Situation) -> int:
    config, choice = step.config, step.choice
    of_data, of_groups = buffers_of_step(config, situation, shape, choice)
    if step.slots:
        of_slots = slot_buffers_of_step(config, situation, shape, choice, step.rank)
        return of_data.all_gather + of_slots.total
    total = of_data.all_gather + of_data.reduce_scatter + of_data.all_reduce
    return total + of_groups.sequence + of_groups.all_reduce


def _speed(config: Config, shape: Shape, found: TracedStep, job: TrainingJob) -> Speed:
    time = step_time([_load(phase, job) for phase in found.phases], job.gpu, job.assumptions)
    tokens = config.train.global_batch_size * config.train.seq_len
    adapter = Adapter.of(config.adapter)
    trained = None if adapter is None else adapter.elements(shape)
    each = flops_per_token(shape, config.train.seq_len, trained, config.preferences.on)
    needed = each * tokens
    mfu = needed / (time.total * job.world * job.gpu.flops)
    return Speed(time, tokens / time.total, mfu, communication_advice(config, job.choice, time))


def _load(phase: StepPhase, job: TrainingJob) -> Load:
    within = between = waited = 0.0
    for collective, size in phase.sent.items():
        traffic = _traffic(collective, size, job)
        if collective.dimension == "tensor":
            waited += traffic.within / job.ranks_per_node
        else:
            within += traffic.within / job.ranks_per_node
            between += traffic.between
    operations = [(flops, size, number) for (flops, size), number in phase.work.items()]
    return Load(phase.times, operations, within, between, waited)


def _exchanges(found: TracedStep, job: TrainingJob) -> list[Exchange]:
    given, listed = job.assumptions, []
    for collective, size in found.sent.items():
        traffic = _traffic(collective, size, job)
        inside = traffic.within / job.ranks_per_node / job.gpu.link_rate
        seconds = max(inside, traffic.between / given.network) / given.network_share
        listed.append(Exchange(collective, size, traffic, seconds))
    return sorted(listed, key=lambda exchange: -exchange.seconds)


def _traffic(collective: Collective, size: int, job: TrainingJob) -> Traffic:
    if collective.operation == "all_to_all":
        return all_to_all_traffic(size, collective.dimension, job.mesh, job.ranks_per_node)
    passes = 2 if collective.operation == "all_reduce" else 1
    return ring_traffic(passes * size, collective.dimension, job.mesh, job.ranks_per_node)


def _saves(
    config: Config, found: TracedStep, job: TrainingJob, step_seconds: float
) -> PlannedSaves:
    given = job.assumptions
    seconds = found.state / given.storage
    copied = found.state / job.world / given.to_host
    pause = copied if config.checkpoint.async_save else copied + seconds
    young = young_interval(pause, given.node_failure / job.nodes)
    # A save before the last one is durable gains nothing.
    interval = max(young, seconds)
    return PlannedSaves(
        found.state, seconds, pause, interval, max(1, round(interval / step_seconds))
    )


_KINDS = {
    "parameters": "parameters, this rank's shard",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered parameters",
    "activations": "activations",
    "loss": "logits and loss",
    "backward": "gradients on their way",
    "other": "other",
}
_PARTS = {
    "compute": "products of matrices",
    "memory": "reading and writing the GPU's memory",
    "within_node": "waiting for GPUs of the node",
    "between_nodes": "waiting for other nodes",
}
_BOUND = {
    "compute": "compute",
    "memory": "the GPU's memory rate",
    "within_node": "the links within a node",
    "between_nodes": "the network between nodes",
}


def to_text(plan: Plan) -> str:
    parts = (_world, _memory, _exchange_lines, _time, _save_lines, _traced, _assumed, _verdict)
    return "\n\n".join(lines for part in parts if (lines := "\n".join(part(plan))))


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan in bytes, seconds, FLOPs, and per second."""
    content, time = asdict(plan), plan.speed.time
    content["room"]["memory"]["total"] = plan.room.memory.total
    content["speed"]["time"] |= {"total": time.total, "bound": time.bound}
    for exchange in content["exchanges"]:
        operation, dimension = exchange["collective"]
        exchange["collective"] = {"operation": operation, "dimension": dimension}
    return {"fits": plan.fits, **content}


def _world(plan: Plan) -> Iterator[str]:
    world = f"{count(plan.job.world, 'rank')} on {count(plan.job.nodes, 'node')}"
    yield f"{world}, one {plan.job.gpu.name} each: {plan.job.mesh}"
    yield f"communication: {plan.job.choice.describe()}"
    yield f"  {plan.job.choice.reason}"


def _memory(plan: Plan) -> Iterator[str]:
    room = f"{size_text(plan.room.memory.total)} of {size_text(plan.room.limit)} (0.9 of the GPU)"
    yield f"memory of a rank at its peak: {room}"
    for kind in KINDS:
        if size := getattr(plan.room.memory, kind):
            yield f"  {_KINDS[kind]:<32}{size_text(size):>12}"


def _exchange_lines(plan: Plan) -> Iterator[str]:
    if not plan.exchanges:
        return
    yield "in a step, sent by each node       within it    to others   by itself"
    for exchange in plan.exchanges:
        operation, dimension = exchange.collective
        name = f"{operation.replace('_', '-')} over {dimension}"
        within, between = size_text(exchange.traffic.within), size_text(exchange.traffic.between)
        yield f"  {name:<30}{within:>12} {between:>12} {seconds_text(exchange.seconds):>11}"


def _time(plan: Plan) -> Iterator[str]:
    time = plan.speed.time
    speed = f"{plan.speed.tokens_per_second:,.0f} tokens/s, MFU {_share(plan.speed.mfu)}"
    yield f"a step takes {seconds_text(time.total)}: {speed}"
    for part, words in _PARTS.items():
        if seconds := getattr(time, part):
            share = _share(seconds / time.total)
            yield f"  {words:<40}{seconds_text(seconds):>11} {share:>6}"
    yield f"  bound by {_BOUND[time.bound]}; a rank computes {flops_text(plan.flops.traced)}"
    if plan.speed.hint:
        yield f"  {plan.speed.hint}"


def _save_lines(plan: Plan) -> Iterator[str]:
    saves = plan.saves
    yield (
        f"a checkpoint has {size_text(saves.bytes)}, is written in {seconds_text(saves.seconds)}, "
        f"and holds training up for {seconds_text(saves.pause)}"
    )
    long = saves.interval >= 60
    every = f"{saves.interval / 60:.3g} min" if long else seconds_text(saves.interval)
    yield f"  save about every {every}, {count(saves.interval_steps, 'step')} (Young's formula)"


def _traced(plan: Plan) -> Iterator[str]:
    flops, sent = plan.flops, plan.sent
    yield "traced: memory, operations and collectives of the step, on tensors without memory"
    if flops.traced == flops.by_formula and sent.traced == sent.by_formula:
        yield "  FLOPs and bytes sent equal those of the formulas in kempner/model/spec"
    else:
        yield (
            f"  the formulas say {flops.by_formula:,} FLOPs instead of {flops.traced:,}, and "
            f"{sent.by_formula:,} bytes sent instead of {sent.traced:,}: please report it"
        )
    for note in plan.notes:
        yield f"  {note}"


def _assumed(plan: Plan) -> Iterator[str]:
    gpu, given = plan.job.gpu, plan.job.assumptions
    yield f"assumed, of peak figures ({gpu.source}):"
    yield f"  {_share(given.compute_share)} of {gpu.flops / 1e12:,.0f} TFLOP/s in bfloat16"
    yield f"  {_share(given.memory_share)} of {gpu.memory_rate / 1e12:.2f} TB/s in a GPU's memory"
    yield (
        f"  {_share(given.network_share)} of {gpu.link_rate / 1e9:,.0f} GB/s from a GPU to others "
        f"of its node, and of {8 * given.network / 1e9:,.0f} Gb/s from a node to others"
    )
    yield "  in a forward or a backward, computing hides all that is sent but in tensor groups"
    yield "  a tenth of a GPU's memory is for CUDA, NCCL and what the allocator cannot use"
    yield (
        f"  checkpoints are written at {given.storage / 1e9:g} GB/s, and copied to the host at "
        f"{given.to_host / 1e9:g} GB/s a rank"
    )
    yield f"  a node fails every {given.node_failure / 86_400:,.0f} days"


def _verdict(plan: Plan) -> Iterator[str]:
    if plan.fits:
        left = size_text(plan.room.limit - plan.room.memory.total)
        yield f"fits: {left} of a GPU's memory are left"
    else:
        yield f"does not fit: {plan.room.advice}"


def _share(part: float) -> str:
    return f"{100 * part:.0f} %"
