"""A world of which only one rank is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# The only store whose ranks need not be there; torch ships it, and registers its backend with it.
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.model.spec.mesh import MeshDegrees


@contextmanager
def fake_ranks(degrees: MeshDegrees) -> Iterator[DeviceMesh]:
    """A mesh whose first rank is this process; its collectives return at once, and move nothing.

    The process must not be part of another process group.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degrees.world)
    sizes = degrees.dimensions()
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()
        if degrees.tensor > 1:
            # What DTensor remembers of a mesh names groups that are gone.
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
