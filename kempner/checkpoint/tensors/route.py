"""Maps each tensor of the state to its place in this rank's file; and compares, by digests, the
tensors that must be the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from xxhash import xxh3_64

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format import compact_index, shard_plan
from kempner.checkpoint.format.manifest import FileEntry, entry_of
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.io.file_writer import BaseFiles
from kempner.checkpoint.registered.composite import Modules
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, tensor_specs
from kempner.checkpoint.tensors.staging import StagedCopy, Stager
from kempner.checkpoint.tensors.state import Binding, check_names, is_sharded, local_part
from kempner.checkpoint.tensors.step_slots import StepSlots
from kempner.run.process.exit_codes import UsageError


@dataclass(frozen=True)
class FileLayout:
    """The layout of the state's files: planned once, and again only if the tensor specs change."""

    specs: list[shard_plan.TensorSpec]
    keys: list[str]
    """The keys of the tensors that this rank writes, in the order of `placed`, then `base`."""
    placed: list[shard_plan.Placed]
    world: int
    base: list[shard_plan.Placed] = field(default_factory=list)
    """The frozen tensors that this rank writes, into a separate file."""

    @cached_property
    def described(self) -> dict[str, memoryview]:
        """The index and, up to a certain world size, DCP's `.metadata`, by file name. Used only by
        rank 0, in the writing thread."""
        index = compact_index.encode(self.specs, self.world, container)
        files = {compact_index.INDEX: memoryview(index)}
        if self.world <= compact_index.METADATA_UP_TO:
            from kempner.checkpoint.tensors.dcp_metadata import metadata_of  # imports DCP

            files[METADATA] = metadata_of(self.specs, self.world)
        return files

    @cached_property
    def described_entries(self) -> dict[str, FileEntry]:
        return {name: entry_of(content) for name, content in self.described.items()}

    @cached_property
    def digest(self) -> int:
        """The plan's digest, which the ranks compare."""
        return shard_plan.digest(self.specs)

    @classmethod
    def of(cls, specs: list[shard_plan.TensorSpec], group: dist.ProcessGroup) -> FileLayout:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        files = [shard_plan.place(part, rank, container) for part in shard_plan.by_file(specs)]
        return cls(
            specs=specs,
            keys=[item.chunk.key for placed in files for item in placed],
            placed=files[0],
            world=world,
            base=files[1] if files[1:] else [],
        )

    @property
    def has_base(self) -> bool:
        """Whether there are files of frozen tensors; the same on all ranks."""
        return any(spec.base for spec in self.specs)


@dataclass(frozen=True)
class Route:
    """The copies that fill the `image` of this rank's file and that of its `base`: pairs of a view
    of the image and the tensor that is copied into it."""

    binding: Binding
    layout: FileLayout
    image: FileBuffer
    base: FileBuffer | None
    steady: list[tuple[Tensor, Tensor]]
    """Tensors that are only written by updates: copied during the next forward pass."""
    watched: list[tuple[str, Tensor]]
    """The keys of `steady`, and the tensors that count writes to them."""
    volatile: list[tuple[Tensor, Tensor]]
    """Buffers and other tensors that the forward pass may write: copied at once."""

    @classmethod
    def of(
        cls,
        binding: Binding,
        layout: FileLayout,
        image: FileBuffer,
        base: FileBuffer | None = None,
        at_once: Collection[str] = (),
    ) -> Route:
        """Pair the tensors of `binding` with views of the images. `at_once` are the keys of
        parameters and optimizer state that are also written outside of updates."""
        steady, watched, volatile = [], [], []
        views = [*image.views, *(base.views if base is not None else ())]
        for key, view in zip(layout.keys, views, strict=True):
            tensor = local_part(binding.table[key])
            written = key in binding.buffers or key in binding.numbers or key in at_once
            if written or tensor.is_inference():  # inference tensors count no writes
                volatile.append((view, tensor))
            else:
                steady.append((view, tensor))
                watched += [(key, counting) for counting in binding.written_as(key)]
        return cls(binding, layout, image, base, steady, watched, volatile)

    def stage(
        self, stager: Stager, step: int, complete: Callable[[], None] | None = None
    ) -> StagedCopy:
        """Start to copy the state of `step`; nothing may write to the steady tensors until done.
        `complete` is called after the copy, unless one of them was written to meanwhile."""
        self.binding.read_numbers()
        for view, tensor in self.volatile:
            view.copy_(tensor)
        copy = StagedCopy(self.watched)
        views, parts = [view for view, _ in self.steady], [part for _, part in self.steady]

        def copied() -> None:
            if not copy.judge() and complete is not None:
                complete()

        copy.done = stager.copy(views, parts, step, copied)
        return copy


class Routes:
    """Finds the state of a model and its optimizer, and the route into this rank's file. Keeps the
    route while the tensors stay the same, and the layout while their specs do."""

    def __init__(
        self, context: CheckpointContext, model: nn.Module, optimizer: Optimizer, slots: StepSlots
    ) -> None:
        self.device = next(iter(model.parameters())).device
        self.model, self.optimizer, self.slots = model, optimizer, slots
        self.base_files = BaseFiles(context.folder)
        self._context = context
        self._layout: FileLayout | None = None
        self._image: FileBuffer | None = None
        self._base: FileBuffer | None = None
        self._at_once: frozenset[str] = frozenset()
        self._binding: Binding | None = None
        self._begun: frozenset[str] | None = None
        self._routes: dict[FileBuffer, Route] = {}

    def find(self) -> Route:
        """The route into an image in this process's memory. Raises `UsageError` if a checkpoint
        cannot hold the state."""
        binding, layout = self.plan()
        self._image = self._image or FileBuffer(layout.placed)
        if layout.has_base and self._base is None:
            self._base = FileBuffer(layout.base)
        return self.to(self._image, binding, layout)

    def to(self, image: FileBuffer, binding: Binding, layout: FileLayout) -> Route:
        if image not in self._routes:
            self._routes[image] = Route.of(binding, layout, image, self._base, self._at_once)
        return self._routes[image]

    def plan(self) -> tuple[Binding, FileLayout]:
        """The state's tensors, and the layout of the file. Raises as `find`."""
        binding, layout = self._binding, self._layout
        if binding is None or not binding.intact():
            self.forget()
            binding = Binding(self.model, self.optimizer)
            self.check_names(binding.table)
            self._binding = binding
            specs = tensor_specs(binding.table, self._context.world, binding.frozen)
            if layout is None or layout.specs != specs:
                layout = FileLayout.of(specs, self._context.group)
                self._image = self._base = None
                self.slots.lay_out(layout.placed)
        assert layout is not None  # there is one for every binding
        self._layout = layout
        return binding, layout

    def check_names(self, table: Mapping[str, Tensor]) -> None:
        """Raise `UsageError` if the model has other tensors than at the first call."""
        if self._begun is None:
            self._begun = frozenset(key for key in table if key.startswith("model."))
        check_names(table, self._begun)

    def empty(self) -> FileLayout:
        """The layout of an empty file, for a state that no file can hold."""
        return FileLayout.of([], self._context.group)

    def copy_at_once(self, keys: Collection[str]) -> None:
        """From now on copy these tensors in the training thread."""
        if not self._at_once.issuperset(keys):
            self._at_once |= frozenset(keys)
            self._routes.clear()

    def forget(self) -> None:
        """Release the tensors, which are about to be replaced; keep the layout."""
        self._binding = None
        self._routes.clear()


_PIECE = 16 << 20  # elements copied to the host at a time


def digests(table: Mapping[str, Tensor]) -> dict[str, int]:
    """A digest of each tensor that is not a DTensor."""
    return {key: _digest(tensor) for key, tensor in table.items() if not is_sharded(tensor)}


def combine(held: Mapping[str, int]) -> int:
    """One 63-bit digest of all of `held`."""
    return shard_plan.number_of(repr(sorted(held.items())))


def agree(context: CheckpointContext, look: Callable[[], Mapping[str, int]]) -> None:
    """Compare the digests that `look` returns, one per tensor, over all ranks. Raises `UsageError`
    on all ranks alike: that of `look` on any rank, or one that names a tensor that differs."""
    held: Mapping[str, int] = {}
    refusal = None
    try:
        held = look()
    except UsageError as error:
        refusal = str(error)
    gathered = context.gather((refusal, combine(held)))
    for refused, _ in gathered:
        if refused is not None:
            raise UsageError(refused)
    if any(number != gathered[0][1] for _, number in gathered):
        raise UsageError(describe_difference(context.gather(held)))


def describe_difference(by_rank: Sequence[Mapping[str, int]]) -> str:
    """A sentence that names a tensor that differs between ranks; `by_rank` has their digests."""
    first = by_rank[0]
    for rank, held in enumerate(by_rank):
        if lacking := sorted(first.keys() ^ held.keys()):
            has, lacks = (0, rank) if lacking[0] in first else (rank, 0)
            return f"rank {has} has {lacking[0]}, and rank {lacks} does not: all must hold the same"
        for key in sorted(held):
            if held[key] != first[key]:
                return (
                    f"{key} is not the same on rank 0 and rank {rank}, and a checkpoint holds it "
                    "once: let DistributedDataParallel or SyncBatchNorm keep it the same, or "
                    "broadcast it in every step"
                )
    return "the ranks hold different states"


class SharedBuffers:
    """The buffers that `DistributedDataParallel` broadcasts from rank 0 before each forward pass.
    Until then those of other ranks, such as running statistics, may differ, but are not used."""

    def __init__(self, model: nn.Module) -> None:
        wrapped = model.wrapped if isinstance(model, Modules) else (model,)
        modules = (module for given in wrapped for module in given.modules())
        parallel = (module for module in modules if isinstance(module, DistributedDataParallel))
        self._parallel = [module for module in parallel if module.broadcast_buffers]

    def share(self) -> None:
        """Broadcast them from rank 0 now; called on every rank."""
        for parallel in self._parallel:
            ignored = parallel.parameters_to_ignore
            buffers = [b for name, b in parallel.module.named_buffers() if name not in ignored]
            for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
                _share_from_rank_0([b for b in buffers if b.dtype is dtype], parallel.process_group)


@torch.no_grad()
def _share_from_rank_0(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    together = torch.cat([buffer.reshape(-1) for buffer in buffers])
    dist.broadcast(together, group=group, group_src=0)
    parts = torch.split(together, [buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view(buffer.shape))


def _digest(tensor: Tensor) -> int:
    total = xxh3_64()
    if tensor.numel():
        for piece in torch.split(tensor.detach().reshape(-1), _PIECE):
            total.update(piece.cpu().view(torch.uint8).numpy().data)
    return total.intdigest()
