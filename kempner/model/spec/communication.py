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

from kempner.model.spec.adapter import Adapter
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.spec.slot_tree import slots_of, subtrees

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

    def turns(self, shards: int) -> int:
        """With `train.same_on_any_world` and this many shards: the neighbouring ranks that take
        slots in turn, so that none needs the whole gradient; 1 if it is sent once a step."""
        return 1 if self.reduce_once else shards

    def describe(self) -> str:
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
class SlotBuffers:
    """As `Buffers`, of what takes the place of reductions with `train.same_on_any_world`."""

    over_shards: int
    """What is received from the ranks that share parameters, in all-to-alls."""
    over_replicas: int
    """The same from replicas."""
    all_gather: int
    """A rank's part of the gradients, of which each replica has added up an equal share."""

    @property
    def total(self) -> int:
        return self.over_shards + self.over_replicas + self.all_gather


@dataclass(frozen=True)
class TensorBuffers:
    """Bytes of all buffers of one rank's collectives in its tensor group in a step, by kind."""

    sequence: int
    """Activations that are gathered, or summed and scattered, of the whole sequence."""
    all_reduce: int
    """Gradients of norms, and what the loss needs of the other rows of the vocabulary."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that the ranks of one node send in a step."""

    within: int
    """To ranks of the same node."""
    between: int
    """To other nodes."""


def step_buffers(
    shape: Shape,
    mesh: MeshDegrees,
    choice: Choice,
    *,
    micro_batches: int,
    compute_bytes: int,
    adapter: Adapter | None = None,
    reference: bool = False,
) -> Buffers:
    """What one rank's collectives over shards and replicas are given in a step, to the byte;
    `compute_bytes` are 2 for bfloat16, 4 for float32.

    With P parameters, c bytes of the compute type, m micro batches and S = `shard`: gathers of
    c P for a step if they are kept, and otherwise for a micro batch twice that, less the embedding,
    which the backward does not need, and the last block and the output, which it begins with;
    4 P for each reduction; 4 P / S for the one all-reduce over replicas. Rows that S does not
    divide are filled up. In a tensor group P is what one of its ranks has. With an `adapter` P is
    more for each gather, and only what the adapter has for each reduction. The forward of a
    `reference` gathers once more for a micro batch, unless parameters are kept. The scalars of a
    step (tokens, loss, gradient norm) are left out.
    """
    sharded, replicated = mesh.shard > 1, mesh.replicate > 1
    pairs = [] if adapter is None else _pairs(shape, adapter, mesh.tensor)
    gathered = reduced = 0
    for tensors, number, per_micro_batch in _groups(shape, mesh.tensor, pairs):
        elements = number * _filled_up(tensors, mesh.shard)
        again = micro_batches * (per_micro_batch + reference)
        gathered += elements * (1 if choice.keep_parameters else again)
        reduced += elements
    if adapter is not None:
        reduced = shape.n_layers * _filled_up(pairs, mesh.shard)
    times = 1 if choice.reduce_once else micro_batches
    return Buffers(
        all_gather=compute_bytes * gathered if sharded else 0,
        reduce_scatter=REDUCED_BYTES * reduced * times if sharded else 0,
        # However often shards are reduced: the sum of a step's shards takes no more memory.
        all_reduce=REDUCED_BYTES * reduced // mesh.shard if replicated else 0,
    )


def slot_buffers(
    shape: Shape,
    mesh: MeshDegrees,
    choice: Choice,
    *,
    slots: int,
    micro_batches: int,
    rank: int,
    adapter: Adapter | None = None,
) -> SlotBuffers:
    """What one rank's collectives for gradients are given with `train.same_on_any_world`, to the
    byte; there are `slots` in a step. Of the elements that it has of each group of parameters it
    receives every sum of a subtree from all ranks that shard them; or, of slots that are taken in
    turn, everything in each micro batch. Then replicas exchange equal parts of all their sums."""
    pairs = [] if adapter is None else _pairs(shape, adapter, mesh.tensor)
    groups = [(tensors, number) for tensors, number, _ in _groups(shape, mesh.tensor, pairs)]
    if adapter is not None:
        groups = [(pairs, shape.n_layers)]
    in_turn, first = choice.turns(mesh.shard) > 1, rank - rank % mesh.shard
    of_shards = sum(_sums_of(slots, first + shard, mesh.world) for shard in range(mesh.shard))
    of_replicas = sum(_sums_of(slots, each, mesh.replicate) for each in range(mesh.replicate))
    of_each = over_shards = 0
    for tensors, number in groups:
        filled = _filled_up(tensors, mesh.shard)
        own = filled // mesh.shard if in_turn else _shard_of(tensors, rank % mesh.shard, mesh.shard)
        over_shards += number * (filled * micro_batches if in_turn else own * of_shards)
        of_each += number * -(-own // mesh.replicate) * REDUCED_BYTES
    return SlotBuffers(
        over_shards=REDUCED_BYTES * over_shards if mesh.shard > 1 else 0,
        over_replicas=of_each * of_replicas if mesh.replicate > 1 else 0,
        all_gather=of_each * mesh.replicate if mesh.replicate > 1 else 0,
    )


def slot_traffic(buffers: SlotBuffers, mesh: MeshDegrees, ranks_per_node: int) -> Traffic:
    """What these make each node send."""
    parts = (
        all_to_all_traffic(buffers.over_shards, "shard", mesh, ranks_per_node),
        all_to_all_traffic(buffers.over_replicas, "replicate", mesh, ranks_per_node),
        ring_traffic(buffers.all_gather, "replicate", mesh, ranks_per_node),
    )
    return Traffic(sum(part.within for part in parts), sum(part.between for part in parts))


def _sums_of(slots: int, rank: int, world: int) -> int:
    return len(subtrees(slots_of(slots, rank, world)))


def tensor_buffers(
    shape: Shape,
    choice: Choice,
    *,
    micro_batches: int,
    tokens: int,
    compute_bytes: int,
    recomputed_blocks: int = 0,
    adapter: Adapter | None = None,
    reference: bool = False,
) -> TensorBuffers:
    """What one rank's collectives in its tensor group are given in a step, to the byte; `tokens`
    are those of a micro batch, `recomputed_blocks` have activation checkpointing.

    Each block gathers the sequence twice and scatters it twice, and so does its backward; embedding
    and last norm do each once, and so do theirs. A block that computes again gathers twice more and
    scatters once: what it ends with is not needed. See Korthikanti et al., arXiv:2205.05198,
    section 4.2; with dropout it is, and scattered, too. Gradients of norms are summed as all are
    reduced: in float32 if once a step; with an `adapter`, instead, those of its matrices that all
    ranks have whole. In the loss, each token has three numbers in float32. A `reference` adds a
    forward and its loss.
    """
    passes = 8 * shape.n_layers + 4 + (4 if shape.dropout else 3) * recomputed_blocks
    heads = 2 * shape.head_dim * shape.n_layers if shape.qk_norm else 0
    norms = shape.dim * (2 * shape.n_layers + 1) + heads
    if adapter is not None:
        passes -= 2  # nothing trains below the first norm
        norms = shape.n_layers * len(adapter.targets) * adapter.rank * shape.dim
    passes += reference * (4 * shape.n_layers + 2)
    of_loss = 3 * 4 * tokens * micro_batches * (1 + reference)
    reduced = REDUCED_BYTES if choice.reduce_once else compute_bytes * micro_batches
    return TensorBuffers(
        sequence=micro_batches * compute_bytes * tokens * shape.dim * passes,
        all_reduce=norms * reduced + of_loss,
    )


def tensor_traffic(buffers: TensorBuffers, tensor: int, ranks_per_node: int) -> int:
    """Bytes that the ranks of one node send to others of their tensor groups, which are on it."""
    whole = buffers.sequence + 2 * buffers.all_reduce
    return _ring(tensor, 1, ranks_per_node).within * whole // tensor


def node_traffic(buffers: Buffers, mesh: MeshDegrees, ranks_per_node: int) -> Traffic:
    """What the collectives make each node send, where they are rings in the order of the ranks."""
    shards = buffers.all_gather + buffers.reduce_scatter
    of_shards = ring_traffic(shards, "shard", mesh, ranks_per_node)
    of_replicas = ring_traffic(2 * buffers.all_reduce, "replicate", mesh, ranks_per_node)
    return Traffic(of_shards.within + of_replicas.within, of_shards.between + of_replicas.between)


def all_to_all_traffic(
    size: int, dimension: str, mesh: MeshDegrees, ranks_per_node: int
) -> Traffic:
    """What each node sends in an all-to-all along a mesh dimension, of which each rank receives
    `size` bytes, as much from each: unlike in a ring, nothing is added up on its way."""
    members = mesh.dimensions().get(dimension, 1)
    on_a_node = _on_a_node(members, _stride(dimension, mesh), ranks_per_node)
    return Traffic(
        ranks_per_node * size * (on_a_node - 1) // members,
        ranks_per_node * size * (members - on_a_node) // members,
    )


def ring_traffic(size: int, dimension: str, mesh: MeshDegrees, ranks_per_node: int) -> Traffic:
    """What each node sends where the rings of a mesh dimension pass buffers of `size` bytes once.
    An all-reduce passes its buffer twice. `dimension` may also be "world", of all ranks."""
    members = mesh.world if dimension == "world" else mesh.dimensions().get(dimension, 1)
    ring = _ring(members, _stride(dimension, mesh), ranks_per_node)
    return Traffic(ring.within * size // members, ring.between * size // members)


def _stride(dimension: str, mesh: MeshDegrees) -> int:
    """By how many ranks the neighbours along a dimension are apart."""
    return {"replicate": mesh.shard * mesh.tensor, "shard": mesh.tensor}.get(dimension, 1)


def _on_a_node(size: int, stride: int, ranks_per_node: int) -> int:
    """How many of `size` ranks that are `stride` apart a node has. Nodes are alike."""
    return min(size, max(1, ranks_per_node // stride))


def _ring(size: int, stride: int, ranks_per_node: int) -> Traffic:
    """How many parts of a buffer, each 1 / `size` of it, a node sends in one pass of all rings. The
    members of a ring are `stride` ranks apart. Nodes are alike."""
    on_a_node = _on_a_node(size, stride, ranks_per_node)
    leaving = ranks_per_node // on_a_node if on_a_node < size else 0
    return Traffic((ranks_per_node - leaving) * (size - 1), leaving * (size - 1))


def _groups(shape: Shape, tensor: int, pairs: Tensors) -> list[tuple[Tensors, int, int]]:
    """What is gathered at once: tensors, number of such groups, gathers for a micro batch. A block
    has `pairs` of an adapter besides its own."""
    table, norm = (shape.vocab_rows // tensor, shape.dim), (shape.dim,)
    block = [*_block(shape, tensor), *pairs]
    groups: list[tuple[Tensors, int, int]] = [(block, shape.n_layers - 1, 2), (block, 1, 1)]
    if shape.tie_embeddings:
        return [*groups, ([table, norm], 1, 1)]
    return [*groups, ([table], 1, 1), ([norm, table], 1, 1)]


def _block(shape: Shape, tensor: int) -> Tensors:
    """What a rank of a tensor group of size `tensor` has of a block: heads, inner width, whole
    norms."""
    q, kv, ffn = (width // tensor for width in (shape.q_dim, shape.kv_dim, shape.ffn_dim))
    dim = shape.dim
    attention = [(q, dim), (kv, dim), (kv, dim), (dim, q)]
    norms = [(dim,)] * 2 + [(shape.head_dim,)] * (2 if shape.qk_norm else 0)
    return [*attention, (ffn, dim), (dim, ffn), (ffn, dim), *norms]


def _pairs(shape: Shape, adapter: Adapter, tensor: int) -> Tensors:
    """What a rank of a tensor group has of the matrices of an adapter in a block: one of each pair
    is cut, on the side where its layer is."""
    found: list[tuple[int, ...]] = []
    for inputs, outputs, by_rows in adapter.widths(shape):
        first, second = (tensor, 1) if by_rows else (1, tensor)
        found += [(adapter.rank, inputs // first), (outputs // second, adapter.rank)]
    return found


def _shard_of(tensors: Tensors, shard: int, shards: int) -> int:
    """Elements of the tensors that one of several shards has, cut by rows as `torch.chunk` does."""
    found = 0
    for rows, *rest in tensors:
        most = -(-rows // shards)
        found += max(0, min(most, rows - shard * most)) * prod(rest)
    return found


def _filled_up(tensors: Tensors, parts: int) -> int:
    """Elements of the tensors, once their rows are filled up to a multiple of `parts`."""
    return sum(-(-rows // parts) * parts * prod(rest) for rows, *rest in tensors)
