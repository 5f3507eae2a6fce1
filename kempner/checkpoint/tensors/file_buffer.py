"""A rank's data file in memory, byte for byte as on disk.

DCP's format keeps every tensor in its own container (`torch.save`), whose bytes around the data
depend only on dtype and shape, and are written once. The state is then copied directly into the
gaps, and the file is written as one stream that `torch.distributed.checkpoint` can read."""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.serialization import skip_data

from kempner.checkpoint.format.shard_plan import Placed, TensorSpec, file_length
from kempner.checkpoint.io.file_writer import DIRECT_ALIGNMENT
from kempner.checkpoint.tensors.state import is_sharded
from kempner.run.process.exit_codes import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Container:
    """The bytes `before` and `after` the `data` bytes of a tensor in DCP's file format; they depend
    only on dtype and shape."""

    before: bytes
    data: int
    after: bytes

    @cached_property
    def length(self) -> int:
        return len(self.before) + self.data + len(self.after)


BASE_FROM = 1 << 20  # the least bytes of frozen tensors that are worth separate files


def tensor_specs(
    table: Mapping[str, Tensor], world: int, frozen: Collection[str] = ()
) -> list[TensorSpec]:
    """The specs of a state, with these keys `frozen`; the same on every rank. A tensor that is not
    a DTensor counts as replicated over the `world`. Raises `UsageError` for a DTensor whose mesh is
    not the whole world, or with unsupported placements."""
    _refuse_partial_meshes(table, world)
    specs = [_spec(key, tensor, world) for key, tensor in table.items()]
    if sum(table[key].nbytes for key in frozen) < BASE_FROM:
        return specs
    return [replace(spec, base=True) if spec.key in frozen else spec for spec in specs]


@cache
def container(dtype: str, sizes: tuple[int, ...]) -> Container:
    """What `torch.save` puts around a tensor of this dtype and shape."""
    tensor = torch.empty(sizes, dtype=getattr(torch, dtype))
    length = tensor.numel() * tensor.element_size()
    if length == 0:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return Container(buffer.getvalue(), 0, b"")
    with tempfile.TemporaryFile() as file:  # with a hole in the place of the data
        with skip_data():
            torch.save(tensor, file)
        file.seek(0)
        reader: Any = torch._C.PyTorchFileReader(file)
        start = reader.get_record_offset("data/0")
        file.seek(0)
        before = file.read(start)
        file.seek(start + length)
        return Container(before, length, file.read())


def page_aligned(length: int) -> Tensor:
    """`length` zero bytes, aligned for direct I/O."""
    room = torch.zeros(length + DIRECT_ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % DIRECT_ALIGNMENT
    return room[start : start + length]


class FileBuffer:
    """The image of one rank's file with the chunks `placed`, and views into it for their tensors.
    `buffer` is the memory to use: zeros, of the file's length."""

    def __init__(self, placed: Sequence[Placed], buffer: Tensor | None = None) -> None:
        self._buffer = page_aligned(file_length(placed)) if buffer is None else buffer
        self.views = [self._install(item) for item in placed]
        """A view for each placed chunk, in order, with its dtype and sizes."""

    @property
    def content(self) -> memoryview:
        return self._buffer.numpy().data

    @property
    def address(self) -> int:
        return self._buffer.data_ptr()

    def _install(self, item: Placed) -> Tensor:
        extent = container(item.chunk.dtype, item.chunk.sizes)
        data = item.start + len(extent.before)
        end = data + extent.data
        self._put(item.start, extent.before)
        self._put(end, extent.after)
        dtype = getattr(torch, item.chunk.dtype)
        if data == end:
            return torch.empty(item.chunk.sizes, dtype=dtype)
        # torch aligns the data within a container as the plan aligns containers.
        return self._buffer[data:end].view(dtype).view(item.chunk.sizes)

    def _put(self, at: int, content: bytes) -> None:
        if content:
            source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            self._buffer[at : at + len(content)] = source


def _refuse_partial_meshes(table: Mapping[str, Tensor], world: int) -> None:
    """Raise `UsageError` for a mesh that is not all ranks in order, as the shard plan assumes."""
    meshes: dict[DeviceMesh, str] = {}  # few for thousands of tensors, and slow to list
    for key, tensor in table.items():
        if is_sharded(tensor):
            meshes.setdefault(tensor.device_mesh, key)
    for mesh, key in meshes.items():
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(world)):
            some = f"{', '.join(map(str, ranks[:4]))}{', ...' if ranks[4:] else ''}"
            raise UsageError(
                f"{key} is sharded over a mesh of the ranks {some}, and a checkpoint only holds "
                f"what is sharded over all {world} ranks in their order; for replicas of shards "
                "give fully_shard a mesh of two dimensions"
            )


def _spec(key: str, tensor: Tensor, world: int) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return TensorSpec(key, shape, dtype, (world,), (None,))
    placements = tuple(_cut_dimension(key, placement) for placement in tensor.placements)
    mesh = tuple(tensor.device_mesh.shape)
    return TensorSpec(key, shape, dtype, mesh, placements, _order(key, tensor))


def _cut_dimension(key: str, placement: Placement) -> int | None:
    """The dimension of a tensor that a placement shards; None for a replica."""
    from torch.distributed.tensor.placement_types import Replicate, Shard

    if type(placement) is Shard or _is_strided(placement):
        dim: int = placement.dim  # type: ignore[attr-defined]
        return dim
    if isinstance(placement, Replicate):
        return None
    raise UsageError(f"{key} is placed as {placement}, which a checkpoint cannot hold")


def _is_strided(placement: Placement) -> bool:
    """Whether a placement cuts after those to its right: FSDP over tensor parallelism. By name,
    since the class is private, and inherits from `Shard` in some versions of torch."""
    return type(placement).__name__ == "_StridedShard"


def _order(key: str, tensor: DTensor) -> tuple[int, ...]:
    """`TensorSpec.order`. Raises `UsageError` for strided shards of another kind."""
    placements, sizes = tensor.placements, tensor.device_mesh.shape
    late = [level for level, placement in enumerate(placements) if _is_strided(placement)]
    if not late:
        return ()
    for level in late:
        placement: Any = placements[level]
        others = [
            sizes[right]
            for right in range(level + 1, len(sizes))
            if getattr(placements[right], "dim", None) == placement.dim and right not in late
        ]
        if placement.split_factor != math.prod(others):
            raise UsageError(f"{key} is placed as {placements}, which a checkpoint cannot hold")
    early = [level for level in range(len(sizes)) if level not in late]
    return (*early, *late)
