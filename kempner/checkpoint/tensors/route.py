"""Where the state goes: which tensor to which place of this rank's file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.format import compact_index, shard_plan
from kempner.checkpoint.format.manifest import FileEntry, whole_sum
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.tensors.context import CheckpointContext
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, tensor_specs
from kempner.checkpoint.tensors.staging import StagedCopy, Stager
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
    def described(self) -> dict[str, memoryview]:
        """The files that say what is where: the index and, up to some world, DCP's `.metadata`.

        Only rank 0 asks, in the thread that writes.
        """
        index = compact_index.encode(self.specs, self.world, container)
        files = {compact_index.INDEX: memoryview(index)}
        if self.world <= compact_index.METADATA_UP_TO:
            from kempner.checkpoint.tensors.dcp_metadata import metadata_of  # imports DCP

            files[METADATA] = metadata_of(self.specs, self.world)
        return files

    @cached_property
    def described_entries(self) -> dict[str, FileEntry]:
        """What the manifest says of those files."""
        return {
            name: FileEntry(bytes=len(content), xxh3_128=whole_sum(content))
            for name, content in self.described.items()
        }

    @cached_property
    def digest(self) -> int:
        """What the ranks compare, to be sure that they planned alike."""
        return shard_plan.digest(self.specs)

    @classmethod
    def of(cls, specs: list[shard_plan.TensorSpec], group: dist.ProcessGroup) -> FileLayout:
        """Plan this rank's file and allocate its image."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        placed = shard_plan.place(specs, rank, container)
        return cls(
            specs=specs,
            keys=[item.chunk.key for item in placed],
            image=FileBuffer(placed),
            world=world,
        )


@dataclass(frozen=True)
class Route:
    """Which tensor goes where in the image: pairs of a view and the tensor that is copied there."""

    binding: Binding
    layout: FileLayout
    steady: list[tuple[Tensor, Tensor]]
    """Written by nobody between two updates: copied beside the next forward pass."""
    watched: list[tuple[str, Tensor]]
    """Keys of what is steady, and the tensors that count writes to it."""
    volatile: list[tuple[Tensor, Tensor]]
    """Buffers, which that forward pass may write, and whatever else is: copied at once."""

    @classmethod
    def of(cls, binding: Binding, layout: FileLayout, at_once: Collection[str] = ()) -> Route:
        """Pair what `binding` found with the image of `layout`.

        `at_once` are the keys of parameters and optimizer state that are written outside updates.
        """
        steady, watched, volatile = [], [], []
        for key, view in zip(layout.keys, layout.image.views, strict=True):
            tensor = local_part(binding.table[key])
            hasty = key in binding.buffers or key in binding.numbers or key in at_once
            if hasty or tensor.is_inference():  # such tensors count no writes
                volatile.append((view, tensor))
            else:
                steady.append((view, tensor))
                watched += [(key, counting) for counting in binding.written_as(key)]
        return cls(binding, layout, steady, watched, volatile)

    def stage(self, stager: Stager, step: int) -> StagedCopy:
        """Start to copy the state of `step`; nothing may write to what is steady until done."""
        self.binding.read_numbers()
        for view, tensor in self.volatile:
            view.copy_(tensor)
        copy = StagedCopy(self.watched)
        views, parts = [view for view, _ in self.steady], [part for _, part in self.steady]
        copy.done = stager.copy(views, parts, step)
        return copy


class Routes:
    """Finds the state of a model and its optimizer, and its way into this rank's file.

    The way is kept for as long as the tensors are the same, the layout while their specs are.
    """

    def __init__(self, context: CheckpointContext, model: nn.Module, optimizer: Optimizer) -> None:
        self.device = next(iter(model.parameters())).device
        self.model, self.optimizer = model, optimizer
        self._context = context
        self._layout: FileLayout | None = None
        self._at_once: frozenset[str] = frozenset()
        self.route: Route | None = None

    def find(self) -> Route:
        """The way of the state into its file.

        Raises `UsageError` if a checkpoint cannot hold the state.
        """
        if self.route is None or not self.route.binding.intact():
            binding = Binding(self.model, self.optimizer)
            specs = tensor_specs(binding.table, self._context.world)
            if self._layout is None or self._layout.specs != specs:
                self._layout = self._plan(specs)
            self.route = Route.of(binding, self._layout, self._at_once)
        return self.route

    def empty_layout(self) -> FileLayout:
        """That of a file without anything, for a state that no file can hold."""
        return self._plan([])

    def copy_at_once(self, keys: Collection[str]) -> None:
        """Copy these in the thread that trains from now on."""
        if not self._at_once.issuperset(keys):
            self._at_once |= frozenset(keys)
            self.route = None

    def forget(self) -> None:
        """Let go of the tensors, which are about to be replaced; the layout stays."""
        self.route = None

    def _plan(self, specs: list[shard_plan.TensorSpec]) -> FileLayout:
        return FileLayout.of(specs, self._context.group)
