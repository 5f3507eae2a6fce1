"""How much memory a rank needs, estimated before anything is allocated."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from kempner.config.sections import OptimizerSection
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.model.spec.shape import Shape

MASTER_BYTES = 4


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device of one rank, at the moment of the step that needs most.

    What a CUDA context, the allocator's fragments and NCCL's buffers take (a few GB) is not in it.
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

    @property
    def total(self) -> int:
        """All parts together, bytes."""
        return sum(astuple(self))


def estimate_memory(
    shape: Shape,
    *,
    world: int,
    replicate: int = 1,
    tensor: int = 1,
    micro_batch_size: int,
    seq_len: int,
    compute_bytes: int,
    optimizer: OptimizerSection,
    choice: Choice = EACH_MICRO_BATCH,
) -> Estimate:
    """Memory of one rank while it trains.

    With P parameters, W ranks that shard them, of which t make a tensor group, T tokens in a micro
    batch and c bytes per element of the compute type: 4 P / W for each of weights, gradients and
    the moments that the optimizer has; in a world of more than one, c (output + 2 blocks) / t for
    gathered weights and (c + 4) max(output, block) / t for gradients on their way; alone, c P for
    autocast's copies unless c = 4. Gradients that are reduced once a step take 4 P / t, and weights
    that are kept c (P + block) / t. Activations and logits as their own functions say. Nothing is
    recomputed in the backward. Shards of a matrix whose rows W does not divide are up to one row
    larger on some ranks.

    Args:
        shape: sizes of the model.
        world: number of ranks.
        replicate: groups of ranks that each hold all parameters.
        tensor: ranks that compute each layer together; each has 1 / tensor of what is gathered.
        micro_batch_size: sequences per forward.
        seq_len: tokens per sequence.
        compute_bytes: 2 for bfloat16, 4 for float32.
        optimizer: which one, and with what.
        choice: when gradients are reduced, and whether weights are kept; of no effect alone.
    """
    shards = world // replicate
    shard = MASTER_BYTES * -(-shape.parameters // shards)
    tokens = micro_batch_size * seq_len
    head, block = shape.head_parameters, shape.block_parameters
    gradients = shard
    if world > 1:
        whole = shape.parameters + block if choice.keep_parameters else head + 2 * block
        gathered = compute_bytes * whole // tensor
        gradient_buffers = (compute_bytes + MASTER_BYTES) * max(head, block) // tensor
        if choice.reduce_once:
            gradients = MASTER_BYTES * shape.parameters // tensor
    else:
        gathered = 0 if compute_bytes == MASTER_BYTES else compute_bytes * shape.parameters
        gradient_buffers = 0
    return Estimate(
        parameters=shard,
        gradients=gradients,
        moments=MASTER_BYTES * -(-moment_elements(shape, optimizer) // shards),
        gathered=gathered,
        gradient_buffers=gradient_buffers,
        activations=tokens * activation_bytes_per_token(shape, compute_bytes, tensor),
        logits=tokens * logit_bytes_per_token(shape) // tensor,
    )


def moment_elements(shape: Shape, optimizer: OptimizerSection) -> int:
    """Numbers that the optimizer keeps: AdamW two per parameter, SGD and Muon one momentum.

    Muon's are the matrices inside the blocks; what is left of the parameters has AdamW.
    """
    match optimizer.name:
        case "adamw":
            return 2 * shape.parameters
        case "sgd":
            return 0 if optimizer.momentum == 0 else shape.parameters
        case "muon":
            hidden = shape.n_layers * (shape.block_parameters - shape.block_norm_parameters)
            return 2 * shape.parameters - hidden


def activation_bytes_per_token(shape: Shape, compute_bytes: int, tensor: int = 1) -> int:
    """Bytes per token that a forward keeps for the backward, without the logits.

    Counted tensor by tensor, with fused RMSNorm and attention as on CUDA. A block keeps the input
    and the output of both norms and a float32 scale for each; queries, keys, values, what was
    attended and, per head, a float32 sum; four tensors of SwiGLU; with dropout, two byte masks;
    where queries and keys are normalised, both before that, and a float32 scale for each head.
    Outside the blocks: the token id and the last norm. On CPU, where RMSNorm is not fused, each
    norm keeps one more float32 tensor. Each of `tensor` ranks has its part of all but the outputs
    of the norms, which are gathered along the sequence.
    """
    elements = 4 * shape.dim + 2 * shape.q_dim + 2 * shape.kv_dim + 4 * shape.ffn_dim
    masks = 2 * shape.dim if shape.dropout else 0
    scales = 2 + shape.n_heads
    if shape.qk_norm:
        elements += shape.q_dim + shape.kv_dim
        scales += shape.n_heads + shape.n_kv_heads
    block = compute_bytes * elements + 4 * scales + masks
    root = 8 + compute_bytes * 2 * shape.dim + 4
    gathered = compute_bytes * (2 * shape.n_layers + 1) * shape.dim
    return -(-(shape.n_layers * block + root - gathered) // tensor) + gathered


def logit_bytes_per_token(shape: Shape) -> int:
    """Bytes per token of four float32 vectors over the vocabulary.

    Logits, their log-softmax, and the gradients of both, which exist together when the backward
    of the cross entropy begins.
    """
    return 4 * 4 * shape.vocab_rows
