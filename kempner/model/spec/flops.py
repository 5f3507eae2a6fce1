"""The floating-point operations of a training step in products of matrices, by formula."""

from __future__ import annotations

from kempner.config.sections import TrainSection
from kempner.model.spec.shape import Shape


def step_flops(shape: Shape, train: TrainSection, sequences: int, tensor: int = 1) -> int:
    """What one rank multiplies for its `sequences` of a step, recomputation included.

    Two operations per parameter and token forward and four backward. Attention has two products
    forward and five backward, one of which computes the scores again, without a discount for the
    causal mask. A block with full activation checkpointing computes its forward again, but for the
    last product of its feed-forward, which nothing but dropout needs. The loss in chunks leaves out
    rows of the vocabulary that are no token. `shape.flops_per_token` is what a model needs at
    least, by which its utilisation (MFU) is judged; this is what a GPU computes.

    Args:
        shape: sizes of the model.
        train: of the run's configuration.
        sequences: that a rank takes in a step, those it shares with its tensor group included.
        tensor: ranks that compute each layer together.
    """
    matrices = shape.dim * (2 * shape.q_dim + 2 * shape.kv_dim + 3 * shape.ffn_dim)
    attention = 2 * train.seq_len * shape.q_dim
    block = 6 * matrices + 7 * attention
    needless = 0 if shape.dropout else shape.dim * shape.ffn_dim
    again = 2 * (matrices - needless) + 2 * attention
    recomputing = 0
    if train.activation_checkpointing == "full":
        recomputing = -(-shape.n_layers // (train.activation_checkpointing_every or 1))
    chunked = train.loss_chunk > 0 or tensor > 1
    rows = shape.vocab_size if chunked else shape.vocab_rows
    # The first rank of a tensor group has a full part of the rows.
    rows = min(rows, shape.vocab_rows // tensor) if tensor > 1 else rows
    per_token = (shape.n_layers * block + recomputing * again) // tensor + 6 * shape.dim * rows
    return sequences * train.seq_len * per_token
