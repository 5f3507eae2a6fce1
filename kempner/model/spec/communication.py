"""What a training step sends between ranks, before any of it is sent; and which way to choose.

FSDP gathers parameters before they are used, and sums gradients by reduce-scatter; with replicas,
what is left of the sum is an all-reduce. See "PyTorch FSDP", arXiv:2304.11277, and "ZeRO",
arXiv:1910.02054. Each is counted as a ring over its ranks: of n ranks each sends (n - 1) / n of the
buffer in an all-gather or a reduce-scatter, and twice that in an all-reduce (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms", 2009). NCCL's rings are several, of which each node sends
as much as of one; its trees send no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape

REDUCED_BYTES = 4
"""Gradients are summed in float32."""

Tensors = Sequence[tuple[int, ...]]
"""Shapes of parameters."""


@dataclass(frozen=True)
class Choice:
    """When gradients are reduced, and whether parameters are kept; and why so, in a sentence."""

    reduce_once: bool = False
    """Gradients are reduced once a step, not after every micro batch."""
    keep_parameters: bool = False
    """Parameters are kept until the step's last backward, not freed after a block's forward."""
    reason: str = ""

    def describe(self) -> str:
        """The choice in the words of the configuration."""
        return (
            f"reduce_gradients={'step' if self.reduce_once else 'micro_batch'}, "
            f"reshard_after_forward={'never' if self.keep_parameters else 'always'}"
        )


EACH_MICRO_BATCH = Choice()
"""What needs the least memory."""


@dataclass(frozen=True)
class Buffers:
    """Bytes of all buffers of one rank's collectives in a step, by kind."""

    all_gather: int
    """What is gathered, whole."""
    reduce_scatter: int
    """Gradients before they are reduced, whole."""
    all_reduce: int
    """A rank's part of the gradients, which is summed over the replicas."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that the ranks of one node send in a step."""

    within: int
    """To ranks of the same node."""
    between: int
    """To other nodes."""


def step_buffers(
    shape: Shape, mesh: MeshDegrees, choice: Choice, *, micro_batches: int, compute_bytes: int
) -> Buffers:
    """What one rank's collectives of a step are given, to the byte (`tensor` of 1).

    With P parameters, c bytes of the compute type, m micro batches and S = `shard`: gathers of
    c P for a step if they are kept, and otherwise for a micro batch twice that, less the embedding,
    which the backward does not need, and the last block and the output, which it begins with;
    4 P for each reduction; 4 P / S for the one all-reduce over replicas. Rows that S does not
    divide are filled up. The scalars of a step (tokens, loss, gradient norm) are left out.

    Args:
        shape: sizes of the model.
        mesh: how many ranks share what.
        choice: when to send.
        micro_batches: forward and backward passes in a step.
        compute_bytes: 2 for bfloat16, 4 for float32.
    """
    sharded, replicated = mesh.shard > 1, mesh.replicate > 1
    gathered = reduced = 0
    for tensors, number, per_micro_batch in _groups(shape):
        elements = number * _filled_up(tensors, mesh.shard) // mesh.tensor
        gathered += elements * (1 if choice.keep_parameters else micro_batches * per_micro_batch)
        reduced += elements
    times = 1 if choice.reduce_once else micro_batches
    return Buffers(
        all_gather=compute_bytes * gathered if sharded else 0,
        reduce_scatter=REDUCED_BYTES * reduced * times if sharded else 0,
        # However often shards are reduced: the sum of a step's shards takes no more memory.
        all_reduce=REDUCED_BYTES * reduced // mesh.shard if replicated else 0,
    )


def node_traffic(buffers: Buffers, mesh: MeshDegrees, ranks_per_node: int) -> Traffic:
    """What the collectives make each node send, where they are rings in the order of the ranks."""
    of_shards = _ring(mesh.shard, mesh.tensor, ranks_per_node)
    of_replicas = _ring(mesh.replicate, mesh.shard * mesh.tensor, ranks_per_node)
    shards = buffers.all_gather + buffers.reduce_scatter
    replicas = 2 * buffers.all_reduce
    within = of_shards.within * shards // mesh.shard
    within += of_replicas.within * replicas // mesh.replicate
    between = of_shards.between * shards // mesh.shard
    between += of_replicas.between * replicas // mesh.replicate
    return Traffic(within, between)


def _ring(size: int, stride: int, ranks_per_node: int) -> Traffic:
    """How many parts of a buffer, each 1 / `size` of it, a node sends in one pass of all rings.

    The members of a ring are `stride` ranks apart. Nodes are alike.
    """
    on_a_node = min(size, max(1, ranks_per_node // stride))
    leaving = ranks_per_node // on_a_node if on_a_node < size else 0
    return Traffic((ranks_per_node - leaving) * (size - 1), leaving * (size - 1))


def _groups(shape: Shape) -> list[tuple[Tensors, int, int]]:
    """What is gathered at once: tensors, number of such groups, gathers for a micro batch."""
    table, norm = (shape.vocab_rows, shape.dim), (shape.dim,)
    block = _block(shape)
    groups: list[tuple[Tensors, int, int]] = [(block, shape.n_layers - 1, 2), (block, 1, 1)]
    if shape.tie_embeddings:
        return [*groups, ([table, norm], 1, 1)]
    return [*groups, ([table], 1, 1), ([norm, table], 1, 1)]


def _block(shape: Shape) -> Tensors:
    q, kv, dim, ffn = shape.q_dim, shape.kv_dim, shape.dim, shape.ffn_dim
    attention = [(q, dim), (kv, dim), (kv, dim), (dim, q)]
    norms = [(dim,)] * 2 + [(shape.head_dim,)] * (2 if shape.qk_norm else 0)
    return [*attention, (ffn, dim), (dim, ffn), (ffn, dim), *norms]


def _filled_up(tensors: Tensors, parts: int) -> int:
    """Elements of the tensors, once their rows are filled up to a multiple of `parts`."""
    return sum(-(-rows // parts) * parts * prod(rest) for rows, *rest in tensors)
