"""The device mesh of a run: how many ranks along each dimension, and which rank is where."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.config.sections import Config


@dataclass(frozen=True)
class MeshDegrees:
    """A mesh of `replicate` x `shard` x `tensor` ranks, row-major: the ranks of a tensor group
    follow each other.

    Parameters are sharded over `shard` and `tensor`, and are the same along `replicate`. The ranks
    of a tensor group compute on the same samples; everybody else on others.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.data_world * self.tensor

    @property
    def data_world(self) -> int:
        """Into how many parts a global batch is cut."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"replicate {self.replicate} x shard {self.shard} x tensor {self.tensor}"


def resolve_mesh(config: Config, world: int) -> MeshDegrees:
    """The mesh that a configuration asks of `world` ranks."""
    return MeshDegrees(shard=world)
