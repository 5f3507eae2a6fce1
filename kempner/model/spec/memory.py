"""How much memory a rank needs, estimated before anything is allocated.

Chooses when ranks communicate: what sends least between nodes, of what fits the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Literal

from kempner.config.sections import Config, OptimizerSection
from kempner.model.spec.adapter import Adapter
from kempner.model.spec.communication import (
    EACH_MICRO_BATCH,
    Buffers,
    Choice,
    TensorBuffers,
    Traffic,
    node_traffic,
    step_buffers,
    tensor_buffers,
    tensor_traffic,
)
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.spec.slot_tree import most_kept
from kempner.run.output.units import size_text

MASTER_BYTES = 4

Checkpointing = Literal["none", "selective", "full"]
"""As `train.activation_checkpointing`."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device of one rank, at the moment of the step that needs most.

    What a CUDA context, the allocator's fragments and NCCL's buffers take (a few GB) is not in it.

    With P parameters, W ranks that shard them, of which t make a tensor group, T tokens in a micro
    batch and c bytes per element of the compute type: 4 P / W for each of weights, gradients and
    the moments that the optimizer has; in a world of more than one, c (output + 2 blocks) / t for
    gathered weights and (c + 4) max(output, block) / t for gradients on their way; alone, c P for
    autocast's copies unless c = 4. Gradients that are reduced once a step take 4 P / t, and weights
    that are kept c (P + block) / t. `train.same_on_any_world` keeps several sums (`sums_kept`) of
    4 P, and twice as many of an output or a block are on their way; or of 4 P / W, if slots are
    taken in turn. An adapter's numbers are part of P, and then gradients and moments are of those
    alone. Activations, logits and a check of a step (`integrity.recompute_interval`) as their own
    functions say; of preferences 4 T more for the reference's log probabilities, whose forward
    keeps nothing else and is over before the other begins. Shards of a matrix whose rows W does not
    divide are up to one row larger on some ranks.
    """

    parameters: int
    """Float32 master weights, this rank's shard."""
    gradients: int
    """Float32 gradients: this rank's shard, or whole if they are reduced once a step."""
    moments: int
    """The optimizer's float32 state, this rank's shard."""
    gathered: int
    """Whole weights in the compute type: the output's, and two blocks, in use and on the way; or
    all, and one block on the way, if they are kept."""
    gradient_buffers: int
    """Whole gradients of the output or a block, in the compute type and as float32 to be summed."""
    activations: int
    """What the forward keeps for the backward, without the logits."""
    logits: int
    """The logits and what the loss makes of them."""
    recomputation: int = 0
    """What a check of a step for silent corruption takes beyond all others."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


def estimate_memory(
    config: Config,
    shape: Shape,
    mesh: MeshDegrees,
    compute_bytes: int,
    choice: Choice = EACH_MICRO_BATCH,
) -> Estimate:
    """Memory of one rank while it trains; `compute_bytes` is 2 for bfloat16, 4 for float32."""
    train, tensor = config.train, mesh.tensor
    adapter = Adapter.of(config.adapter)
    extra = 0 if adapter is None else adapter.elements(shape)  # in small matrices beside all others
    parameters, trained = shape.parameters + extra, extra or shape.parameters
    tokens = train.micro_batch_size * train.seq_len
    kept = sums_kept(config, mesh, choice)
    # A rank with plain tensors, which autocast copies.
    alone = mesh.world == 1 and (not kept or compute_bytes == MASTER_BYTES)
    sent = 0 if alone else kept
    per_token = activation_bytes_per_token(
        shape,
        compute_bytes,
        train.activation_checkpointing,
        train.activation_checkpointing_every or 1,
        tensor,
        autocast=(alone and compute_bytes != MASTER_BYTES) or adapter is not None,
    )
    moments = moments_of(extra, config.optimizer) or moment_elements(shape, config.optimizer)
    logits = loss_bytes(shape, tokens, train.loss_chunk, compute_bytes, adapter is None) // tensor
    step = Estimate(
        parameters=_shard_bytes(parameters, mesh),
        gradients=_gradients(trained, mesh, choice, kept),
        moments=_shard_bytes(moments, mesh),
        gathered=_gathered(shape, extra, mesh, compute_bytes, choice, alone),
        gradient_buffers=_gradient_buffers(shape, extra, mesh, compute_bytes, choice, sent),
        activations=tokens * per_token,
        logits=logits + (MASTER_BYTES * tokens if config.preferences.on else 0),
    )
    if config.integrity.recompute_interval is None:
        return step
    return replace(step, recomputation=_recomputation(step, mesh, _shard_bytes(trained, mesh)))


def _shard_bytes(elements: int, mesh: MeshDegrees) -> int:
    return MASTER_BYTES * -(-elements // (mesh.shard * mesh.tensor))


def _gradients(trained: int, mesh: MeshDegrees, choice: Choice, kept: int) -> int:
    """Bytes of gradients of `trained` elements; `kept` as `sums_kept` has it."""
    if kept and choice.turns(mesh.shard) > 1:
        return (kept + 1) * _shard_bytes(trained, mesh)  # one is what FSDP takes meanwhile
    if kept or (mesh.world > 1 and choice.reduce_once):
        return max(kept, 1) * MASTER_BYTES * trained // mesh.tensor
    return _shard_bytes(trained, mesh)


def _recomputation(step: Estimate, mesh: MeshDegrees, gradient: int) -> int:
    """Bytes that a check takes beyond the peak of a `step`, where two ranks differ and a third one
    computes, too. The larger of two:

    Before the update the gradient is computed for a third time: two that are reduced, of `gradient`
    bytes, are there beside all that a step takes; and what is exchanged goes to each replica.

    After it, beside weights and moments: those of before the update of two other ranks, a copy of
    them that is updated, and a gradient for each of the three.
    """
    again = 2 * gradient + (mesh.replicate - 1) * step.gradient_buffers
    updated = step.parameters + step.moments + 3 * (step.moments + 2 * gradient)
    return max(again, updated - step.total)


def _gathered(
    shape: Shape, extra: int, mesh: MeshDegrees, compute_bytes: int, choice: Choice, alone: bool
) -> int:
    """Bytes of whole weights that FSDP gathers, or autocast copies for a rank that is `alone`;
    `extra` of which are those of an adapter."""
    parameters, block = shape.parameters + extra, shape.block_parameters + extra // shape.n_layers
    if alone:
        return 0 if compute_bytes == MASTER_BYTES else compute_bytes * parameters
    two = shape.head_parameters + 2 * block
    return compute_bytes * (parameters + block if choice.keep_parameters else two) // mesh.tensor


def sums_kept(config: Config, mesh: MeshDegrees, choice: Choice) -> int:
    """The gradients that a rank has at a time with `train.same_on_any_world`, whole, or its rows if
    slots are taken in turn: sums of subtrees, and that of the newest slot; 0 without it."""
    train = config.train
    if not train.same_on_any_world:
        return 0
    owners = mesh.data_world // choice.turns(mesh.shard)
    return most_kept(-(-train.global_batch_size // train.micro_batch_size), owners)


def _gradient_buffers(
    shape: Shape,
    extra: int,
    mesh: MeshDegrees,
    compute_bytes: int,
    choice: Choice,
    kept: int,
) -> int:
    """Bytes of whole gradients on their way: of an adapter alone, if there is one. Where several
    are `kept`, they are copied to be sent, and as much is received; of slots in turn that of one.
    """
    whole = max(shape.head_parameters, shape.block_parameters)
    largest = extra // shape.n_layers or whole
    if kept and choice.turns(mesh.shard) > 1:
        return (compute_bytes + 2 * MASTER_BYTES) * largest
    if kept:
        return 2 * kept * MASTER_BYTES * largest
    return (compute_bytes + MASTER_BYTES) * largest // mesh.tensor if mesh.world > 1 else 0


def checkpoint_bytes(config: Config, vocab_size: int) -> int | None:
    """What one checkpoint takes: weights that train, and moments, in float32 whatever they compute
    in. None for a model of the user's own, which only a rank creates."""
    if config.model.factory is not None:
        return None
    shape = Shape.of(config.model, vocab_size)
    if (adapter := Adapter.of(config.adapter)) is not None:
        trained = adapter.elements(shape)
        return MASTER_BYTES * (trained + moments_of(trained, config.optimizer))
    return MASTER_BYTES * (shape.parameters + moment_elements(shape, config.optimizer))


def moments_of(trained: int, optimizer: OptimizerSection) -> int:
    """Numbers that AdamW or SGD keeps for `trained` ones."""
    if optimizer.name == "sgd":
        return 0 if optimizer.momentum == 0 else trained
    return 2 * trained


def moment_elements(shape: Shape, optimizer: OptimizerSection) -> int:
    """Numbers that the optimizer keeps: AdamW two per parameter, SGD and Muon one momentum. Muon's
    are the matrices inside the blocks; what is left of the parameters has AdamW."""
    kept = moments_of(shape.parameters, optimizer)
    if optimizer.name != "muon":
        return kept
    return kept - shape.n_layers * (shape.block_parameters - shape.block_norm_parameters)


def activation_bytes_per_token(
    shape: Shape,
    compute_bytes: int,
    checkpointing: Checkpointing = "none",
    checkpointing_every: int = 1,
    tensor: int = 1,
    autocast: bool = False,
) -> int:
    """Bytes per token that a forward keeps for the backward, without the logits. The root keeps the
    token id and the last norm. Where blocks compute again, one of them at a time has, during its
    backward, what it would have kept."""
    root = _divided(8 + compute_bytes * 2 * shape.dim + 4, compute_bytes * shape.dim, tensor)
    block = block_bytes_per_token(shape, compute_bytes, tensor, autocast)
    if checkpointing == "none":
        return root + shape.n_layers * block
    kept = checkpointed_bytes_per_token(shape, compute_bytes, checkpointing, tensor)
    computed_again = -(-shape.n_layers // checkpointing_every)
    rest = shape.n_layers - computed_again
    return root + rest * block + computed_again * kept + max(0, block - kept)


def _divided(whole: int, undivided: int, ranks: int) -> int:
    """What each of `ranks` has of `whole`, of which each needs all that is `undivided`."""
    return -(-(whole - undivided) // ranks) + undivided


def block_bytes_per_token(
    shape: Shape, compute_bytes: int, tensor: int = 1, autocast: bool = False
) -> int:
    """Bytes per token that a block keeps, if it computes nothing again.

    Counted tensor by tensor, with a fused norm of heads and attention as on CUDA. A block keeps the
    input and the output of both norms and a float32 scale for each; queries, keys, values, what was
    attended and, per head, a float32 sum; two tensors of SwiGLU (`kempner/model/fused.py`; four
    with `autocast` or in a tensor group); with dropout, two byte masks; where queries and keys are
    normalised, both before that, and a float32 scale for each head. On CPU, where the norm of heads
    is not fused, each keeps one more float32 tensor. Each of `tensor` ranks has its part of all but
    the outputs of the norms, which are gathered along the sequence.
    """
    of_ffn = 4 if autocast or tensor > 1 else 2
    elements = 4 * shape.dim + 2 * shape.q_dim + 2 * shape.kv_dim + of_ffn * shape.ffn_dim
    masks = 2 * shape.dim if shape.dropout else 0
    scales = 2 + shape.n_heads
    if shape.qk_norm:
        elements += shape.q_dim + shape.kv_dim
        scales += shape.n_heads + shape.n_kv_heads
    whole = compute_bytes * elements + 4 * scales + masks
    return _divided(whole, compute_bytes * 2 * shape.dim, tensor)


def checkpointed_bytes_per_token(
    shape: Shape, compute_bytes: int, mode: Checkpointing, tensor: int = 1
) -> int:
    """Bytes per token that a block keeps which computes again in the backward.

    full: its input. selective: also what its seven matrices and the attention returned, and the
    attention's float32 sum per head. Each of `tensor` ranks has its part, but what the last matrix
    of a branch returned is there as a sum's share, of all tokens.
    """
    if mode == "full":
        return -(-compute_bytes * shape.dim // tensor)
    elements = 3 * shape.dim + 2 * shape.q_dim + 2 * shape.kv_dim + 2 * shape.ffn_dim
    whole = compute_bytes * elements + 4 * shape.n_heads
    return _divided(whole, compute_bytes * 2 * shape.dim, tensor)


def loss_bytes(
    shape: Shape, tokens: int, chunk: int, compute_bytes: int, trains: bool = True
) -> int:
    """Bytes of the logits and of what the loss makes of them, at the end of the forward.

    Whole: four float32 vectors over the vocabulary for each token: logits, their log-softmax, and
    the gradients of both, which exist together when the backward of the cross entropy begins. In
    chunks: for each of their tokens, the logits in the compute type and as float32, and their
    log-softmax; and the gradient of the output projection in float32, if that `trains`, which is
    summed over the chunks before the backward.
    """
    if chunk == 0:
        return tokens * 4 * MASTER_BYTES * shape.vocab_rows
    cast = 0 if compute_bytes == MASTER_BYTES else compute_bytes
    per_token = (2 * MASTER_BYTES + cast) * shape.vocab_size
    of_output = MASTER_BYTES * shape.vocab_rows * shape.dim if trains else 0
    return min(tokens, chunk) * per_token + of_output


USUAL_GPU = 80 * 10**9
"""Bytes of a GPU where none is configured: of an A100 or H100, the most common in training."""
USED = 0.9
"""Share of a GPU's memory that may be filled by count; the rest is for the CUDA context, NCCL's
buffers and the allocator's fragments."""
_GRAIN = 8 * 10**9


@dataclass(frozen=True)
class Situation:
    """What a choice depends on, besides the configuration. It is the same on all ranks. `shape` is
    None for a model of the user's own. `gpu_memory` is in bytes, None on CPUs. `micro_batches` is
    the number in a step."""

    shape: Shape | None
    mesh: MeshDegrees
    ranks_per_node: int
    micro_batches: int
    compute_bytes: int
    gpu_memory: int | None


@dataclass(frozen=True)
class _Option:
    choice: Choice
    traffic: Traffic
    memory: int


def usable_memory(total: int) -> int:
    """Bytes of a GPU of `total` bytes to count on: a multiple of 8 GB, if it has as much. Another
    driver leaves a little more or less of the same GPU, and must not change a choice that the last
    bits of a result depend on."""
    return total // _GRAIN * _GRAIN or total


def choose(config: Config, situation: Situation) -> Choice:
    """What the configuration says; where it says auto, what is best in this situation.

    That is what makes the nodes send each other least, then their ranks among themselves, then
    takes least memory, of what fits 0.9 of the GPU by `estimate_memory`. Where nothing does, and
    where memory or model is not known, what takes least memory. The same arguments give the same
    choice: a run that starts again in the same world computes the same bits.
    """
    section = config.parallelism
    options = list(_allowed(config, situation))
    least = options[0]
    if situation.mesh.data_world == 1:
        return Choice(reason="there is one copy of each part, and nothing to send")
    if "auto" not in (section.reduce_gradients, section.reshard_after_forward):
        return replace(least, reason="the configuration says so")
    if situation.gpu_memory is None:
        return replace(least, reason="it takes least memory, which the CPU ranks of a node share")
    if situation.shape is None:
        return replace(
            least, reason="it takes least memory; how large the model is, only its code knows"
        )
    limit = int(USED * situation.gpu_memory)
    counted = []
    for choice in options:
        arguments = config, situation.shape, situation.mesh, situation.compute_bytes, choice
        traffic = step_traffic(config, situation, situation.shape, choice)
        counted.append(_Option(choice, traffic, estimate_memory(*arguments).total))
    fitting = [option for option in counted if option.memory <= limit]
    if not fitting:
        need = f"needs {size_text(counted[0].memory)} of {size_text(limit)} (0.9 of the GPU)"
        return replace(least, reason=f"it takes least memory, and even so {need}")
    best = min(fitting, key=lambda one: (one.traffic.between, one.traffic.within, one.memory))
    fits = f"fits {size_text(limit)} (0.9 of the GPU) with {size_text(best.memory)}"
    return replace(best.choice, reason=f"of what fits it sends least; it {fits}")


def buffers_of_step(
    config: Config, situation: Situation, shape: Shape, choice: Choice
) -> tuple[Buffers, TensorBuffers]:
    """What one rank's collectives are given in a step: over all ranks, and in its tensor group."""
    train, mesh = config.train, situation.mesh
    number, size = situation.micro_batches, situation.compute_bytes
    adapter = Adapter.of(config.adapter)
    pairs = config.preferences.on
    buffers = step_buffers(
        shape,
        mesh,
        choice,
        micro_batches=number,
        compute_bytes=size,
        adapter=adapter,
        reference=pairs,
    )
    if mesh.tensor == 1:
        return buffers, TensorBuffers(0, 0)
    recomputed = -(-shape.n_layers // (train.activation_checkpointing_every or 1))
    return buffers, tensor_buffers(
        shape,
        choice,
        micro_batches=number,
        tokens=train.micro_batch_size * train.seq_len,
        compute_bytes=size,
        recomputed_blocks=recomputed if train.activation_checkpointing != "none" else 0,
        adapter=adapter,
        reference=pairs,
    )


def step_traffic(config: Config, situation: Situation, shape: Shape, choice: Choice) -> Traffic:
    """What each node sends in a step, with this choice; a tensor group is on one node."""
    mesh, ranks_per_node = situation.mesh, situation.ranks_per_node
    buffers, of_groups = buffers_of_step(config, situation, shape, choice)
    traffic = node_traffic(buffers, mesh, ranks_per_node)
    more = tensor_traffic(of_groups, mesh.tensor, ranks_per_node)
    return Traffic(traffic.within + more, traffic.between)


def _allowed(config: Config, situation: Situation) -> Iterator[Choice]:
    """What the configuration leaves open, what takes least memory first."""
    section = config.parallelism
    reduced = section.reduce_gradients
    whole = situation.gpu_memory is None or situation.mesh.shard == 1
    if config.train.same_on_any_world and reduced == "auto" and whole:
        reduced = "step"  # slots that are taken in turn send more, for the memory of a GPU
    compared = config.integrity.recompute_interval is not None
    if compared:
        reduced = "step"  # of slots that are taken in turn no rank has the whole gradient
    for keep in (False, True):
        for once in (False, True):
            # With one micro batch there is nothing to keep gradients for.
            if reduced == ("micro_batch" if once else "step"):
                continue
            if section.reshard_after_forward == ("always" if keep else "never"):
                continue
            yield Choice(once and (compared or situation.micro_batches > 1), keep)
