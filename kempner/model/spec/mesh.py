"""The device mesh of a run: how many ranks along each dimension, and which rank is where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kempner.config.model import ParallelismSection
from kempner.config.sections import Config
from kempner.model.spec.shape import Shape
from kempner.run.process.exit_codes import UsageError


@dataclass(frozen=True)
class MeshDegrees:
    """A mesh of `replicate` x `shard` x `tensor` ranks, row-major: the ranks of a tensor group
    follow each other.

    Parameters are sharded over `shard` and `tensor`, and are the same along `replicate`. The ranks
    of a tensor group compute on the same samples, all other ranks on different ones.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        return self.data_world * self.tensor

    @property
    def data_world(self) -> int:
        """Into how many parts a global batch is cut."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor

    def dimensions(self) -> dict[str, int]:
        """The dimensions with more than one rank, outermost first; "shard" always."""
        degrees = {"replicate": self.replicate, "shard": self.shard, "tensor": self.tensor}
        return {name: size for name, size in degrees.items() if size > 1 or name == "shard"}

    def __str__(self) -> str:
        return f"replicate {self.replicate} x shard {self.shard} x tensor {self.tensor}"


def resolve_degrees(section: ParallelismSection, world: int) -> MeshDegrees:
    """The mesh of `world` ranks, with -1 replaced by what is left. Raises `UsageError`, with the
    arithmetic, if the degrees cannot make that many."""
    replicate, shard = section.data_parallel_replicate_degree, section.data_parallel_shard_degree
    tensor = section.tensor_parallel_degree
    fixed = tensor * max(replicate, 1) * max(shard, 1)
    left, over = divmod(world, fixed)
    given = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "tensor_parallel_degree": tensor,
    }
    product = " x ".join(f"{name}={degree}" for name, degree in given.items() if degree != -1)
    if -1 not in (replicate, shard):
        if fixed != world:
            raise UsageError(
                f"parallelism: {product} = {fixed} ranks, but there are {world}; let the product "
                "be the number of ranks, or set one of the data parallel degrees to -1"
            )
    elif over or not left:
        raise UsageError(
            f"parallelism: {product} = {fixed} does not divide the {world} ranks; start a multiple "
            f"of {fixed}, or lower a degree"
        )
    return MeshDegrees(
        left if replicate == -1 else replicate, left if shard == -1 else shard, tensor
    )


def check_tensor_degree(config: Config, vocab_size: int) -> None:
    """Raise `UsageError` if the tensor degree does not cut the model, or a sequence, evenly."""
    degree = config.parallelism.tensor_parallel_degree
    if degree == 1:
        return
    shape = Shape.of(config.model, vocab_size)
    advice = "lower it to a divisor"
    divided = {
        "model.n_kv_heads": (shape.n_kv_heads, advice),
        "model.n_heads": (shape.n_heads, advice),
        "model.ffn_dim": (shape.ffn_dim, f"set model.ffn_dim to a multiple of {degree}"),
        "the rows of the vocabulary": (
            shape.vocab_rows,
            f"set model.vocab_multiple to a multiple of {degree}",
        ),
        "train.seq_len": (
            config.train.seq_len,
            f"set train.seq_len to a multiple of {degree}, since sequences are cut, too",
        ),
    }
    for name, (size, what_to_do) in divided.items():
        if size % degree:
            raise UsageError(
                f"parallelism.tensor_parallel_degree={degree} does not divide {name}={size} "
                f"({size} / {degree} = {size / degree:.2f}); {what_to_do}"
            )


def check_tensor_groups(hosts: Sequence[str], degree: int) -> None:
    """Raise `UsageError` where a tensor group is not on one node; `hosts` has that of each rank.
    Its ranks exchange activations in every layer: a network between nodes is too slow for that."""
    for first in range(0, len(hosts), degree):
        if len(found := {*hosts[first : first + degree]}) > 1:
            raise UsageError(
                f"parallelism.tensor_parallel_degree={degree} puts the ranks {first} to "
                f"{first + degree - 1} on {' and '.join(sorted(found))}; lower it to a divisor of "
                "the ranks per node, and let each node have ranks that follow each other"
            )


USUAL_NODE = 8
"""GPUs of a node of which nothing is known."""


def ranks_on_a_node(config: Config, world: int, nodes: int | None) -> int:
    """How many of `world` ranks a node has: as `nodes` says, else `[slurm]`, else 8. Raises
    `UsageError` if the nodes are not alike."""
    slurm = config.slurm
    nodes = nodes or slurm.hosts
    if nodes is not None and world % nodes:
        raise UsageError(
            f"{world} ranks are not equally many on each of {nodes} nodes; let --world be a "
            "multiple of --nodes (or slurm.hosts)"
        )
    usual = slurm.procs or slurm.gpus_per_node or USUAL_NODE
    return world // nodes if nodes is not None else min(world, usual)


def resolve_mesh(config: Config, world: int) -> MeshDegrees:
    """The mesh that a configuration asks of `world` ranks. Raises `UsageError` as its parts do."""
    degrees = resolve_degrees(config.parallelism, world)
    if config.model.vocab_size is not None:
        check_tensor_degree(config, config.model.vocab_size)
    return degrees
