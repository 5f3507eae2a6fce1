"""Where the state goes: which tensor to which place of this rank's file."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from kempner.checkpoint.format import compact_index, shard_plan
from kempner.checkpoint.format.manifest import FileEntry, whole_sum
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, page_aligned
from kempner.checkpoint.tensors.staging import Stager, may_pin
from kempner.checkpoint.tensors.state import Binding, local_part


@dataclass(frozen=True)
class FileLayout:
    """Where the state goes: planned once, and again only if the state's tensors change."""

    specs: list[shard_plan.TensorSpec]
    keys: list[str]
    """Of the tensors that this rank writes, in the order of the image's views."""
    image: FileBuffer
    world: int

    @cached_property
    def described(self) -> memoryview:
        """The file that says what is where; only rank 0 asks, in the thread that writes.

        On a page, as it may be a hundred megabytes, and is written past the page cache.
        """
        if self.described_in == compact_index.INDEX:
            content = compact_index.encode(self.specs, self.world)
        else:
            from kempner.checkpoint.tensors.dcp_metadata import metadata_of  # imports DCP

            content = metadata_of(self.specs, self.world)
        aligned = page_aligned(len(content)).numpy().data
        aligned[:] = content
        return aligned

    @property
    def described_in(self) -> str:
        """The name of that file: DCP's `.metadata`, or the index of a large world."""
        return compact_index.INDEX if self.world > compact_index.COMPACT_ABOVE else METADATA

    @cached_property
    def described_entry(self) -> dict[str, FileEntry]:
        """What the manifest says of that file."""
        entry = FileEntry(bytes=len(self.described), xxh3_128=whole_sum(self.described))
        return {self.described_in: entry}

    @cached_property
    def digest(self) -> int:
        """What the ranks compare, to be sure that they planned alike."""
        return shard_plan.digest(self.specs)

    @classmethod
    def of(
        cls, specs: list[shard_plan.TensorSpec], device: torch.device, group: dist.ProcessGroup
    ) -> FileLayout:
        """Plan this rank's file and allocate its image, for a state that lives on `device`."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        placed = shard_plan.place(specs, rank, container)
        return cls(
            specs=specs,
            keys=[item.chunk.key for item in placed],
            image=FileBuffer(placed, pinned=may_pin(device, shard_plan.file_length(placed))),
            world=world,
        )


@dataclass(frozen=True)
class Route:
    """Which tensor goes where in the image: pairs of a view and the tensor that is copied there."""

    binding: Binding
    layout: FileLayout
    steady: list[tuple[Tensor, Tensor]]
    """Written by nobody between two updates: copied beside the next forward pass."""
    volatile: list[tuple[Tensor, Tensor]]
    """Buffers, which that forward pass may write: copied at once."""

    @classmethod
    def of(cls, binding: Binding, layout: FileLayout) -> Route:
        """Pair what `binding` found with the image of `layout`."""
        pairs: dict[bool, list[tuple[Tensor, Tensor]]] = {False: [], True: []}
        for key, view in zip(layout.keys, layout.image.views, strict=True):
            pairs[key in binding.buffers].append((view, local_part(binding.table[key])))
        return cls(binding, layout, steady=pairs[False], volatile=pairs[True])

    def stage(self, stager: Stager, step: int) -> Future[None]:
        """Start to copy the state of `step`; nothing may write to what is steady until done."""
        for view, tensor in self.volatile:
            view.copy_(tensor)
        views, parts = [view for view, _ in self.steady], [part for _, part in self.steady]
        return stager.copy(views, parts, step)
