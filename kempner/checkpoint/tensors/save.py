"""The background half of a save: write, agree, commit.

Each rank pours its image into a file and sums it. Then each tells rank 0 six numbers, rank 0
commits, and tells the others. Whatever fails on one rank fails the save on all of them, at once
and with that rank's words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from kempner.checkpoint.format import compact_index, shard_plan
from kempner.checkpoint.format.manifest import FileEntry, encode_sidecar, sidecar_name, whole_sum
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.format.shard_plan import data_file
from kempner.checkpoint.io.file_writer import write_stream
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, page_aligned
from kempner.checkpoint.tensors.staging import Stager, may_pin
from kempner.checkpoint.tensors.state import Binding, local_part
from kempner.run.process.durable_io import join_directory, write_durable
from kempner.run.record.attempts import SupersededError

_HALF = 1 << 63

Reached: TypeAlias = Callable[[str], None]
"""Told how far a save is on this rank, in the thread that does it: `stage`, before the copy;
`write`, after the data and before its checksums; `commit`, when the rank has written all its part.
"""


class SaveFailedError(Exception):
    """A save that is not to be had: per rank that failed, why. The same on all ranks."""

    def __init__(self, reasons: Mapping[int, str], superseded: bool) -> None:
        super().__init__("; ".join(f"rank {rank}: {why}" for rank, why in reasons.items()))
        self.reasons = reasons
        self.superseded = superseded


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

    def stage(self, stager: Stager, reached: Reached = lambda part: None) -> Future[None]:
        """Start to copy the state; nothing may write parameters or optimizer state until done."""
        for view, tensor in self.volatile:
            view.copy_(tensor)
        views, parts = [view for view, _ in self.steady], [part for _, part in self.steady]
        return stager.copy(views, parts, first=partial(reached, "stage"))


@dataclass(frozen=True)
class _Note:
    """What a rank tells the others of its part."""

    ok: bool
    plan: int
    data_bytes: int = 0
    sidecar_bytes: int = 0
    sidecar_sum: str = "0" * 32

    def encode(self) -> Tensor:
        high, low = int(self.sidecar_sum[:16], 16), int(self.sidecar_sum[16:], 16)
        numbers = (self.ok, self.plan, self.data_bytes, self.sidecar_bytes)
        return torch.tensor([*map(int, numbers), high - _HALF, low - _HALF], dtype=torch.int64)

    @classmethod
    def decode(cls, numbers: Tensor) -> _Note:
        ok, planned, data_bytes, sidecar_bytes, high, low = numbers.tolist()
        total = f"{high + _HALF:016x}{low + _HALF:016x}"
        return cls(bool(ok), planned, data_bytes, sidecar_bytes, total)


def write_and_commit(
    path: Path,
    layout: FileLayout,
    staged: Future[None],
    group: dist.ProcessGroup,
    commit: Callable[[Mapping[str, FileEntry]], None],
    reached: Reached = lambda part: None,
) -> None:
    """Write the image below `path` once it is `staged`; once all have, rank 0 may `commit`.

    Raises `SaveFailedError` on every rank if anything failed on any.
    """
    rank = dist.get_rank(group)
    planned = _Note(ok=True, plan=layout.digest)
    note, error = _attempt(lambda: _write(path, layout, staged, planned, rank, reached), planned)
    notes = _tell_rank_0(note, group)
    reached("commit")
    if rank == 0 and _agreed(notes):
        note, error = _attempt(lambda: _commit(commit, notes, layout.described_entry), note)
    committed = torch.tensor([note.ok and _agreed(notes)], dtype=torch.int64)
    dist.broadcast(committed, group=group, group_src=0)
    if not committed.item():
        _tell_all(error, layout.digest, group)


def _attempt(work: Callable[[], _Note], note: _Note) -> tuple[_Note, Exception | None]:
    """Do this rank's part. An error is kept, because the others wait to be told of it."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - raised again, on all ranks, by _tell_all
        return replace(note, ok=False), error


def _write(
    path: Path, layout: FileLayout, staged: Future[None], note: _Note, rank: int, reached: Reached
) -> _Note:
    staged.result()
    join_directory(path)
    name = data_file(rank)
    sums = write_stream(path / name, layout.image.content)
    reached("write")
    sidecar = encode_sidecar({name: sums})
    write_durable(path / sidecar_name(rank), sidecar)
    if rank == 0:  # at hundreds of ranks it is no small file
        write_stream(path / layout.described_in, layout.described)
    return replace(
        note,
        data_bytes=sums.bytes,
        sidecar_bytes=len(sidecar),
        sidecar_sum=whole_sum(sidecar),
    )


def _commit(
    commit: Callable[[Mapping[str, FileEntry]], None],
    notes: Sequence[_Note],
    described: Mapping[str, FileEntry],
) -> _Note:
    commit(_list_files(notes, described))
    return notes[0]


def _tell_rank_0(note: _Note, group: dist.ProcessGroup) -> list[_Note]:
    """The notes of all ranks, on rank 0; elsewhere none. What a rank hears does not grow."""
    mine = note.encode()
    if dist.get_rank(group) != 0:
        dist.gather(mine, group=group, group_dst=0)
        return []
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.gather(mine, gathered, group=group, group_dst=0)
    return [_Note.decode(numbers) for numbers in gathered]


def _agreed(notes: Sequence[_Note]) -> bool:
    """Whether every rank wrote its part, and all by the same plan."""
    return all(note.ok and note.plan == notes[0].plan for note in notes)


def _list_files(notes: Sequence[_Note], described: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    files = dict(described)
    for rank, note in enumerate(notes):
        sidecar = sidecar_name(rank)
        files[data_file(rank)] = FileEntry(bytes=note.data_bytes, sums=sidecar)
        files[sidecar] = FileEntry(bytes=note.sidecar_bytes, xxh3_128=note.sidecar_sum)
    return files


def _tell_all(error: Exception | None, planned: int, group: dist.ProcessGroup) -> None:
    """Raise what went wrong anywhere, on every rank."""
    words: list[tuple[str, bool] | int] = [0] * dist.get_world_size(group)
    mine = (str(error), isinstance(error, SupersededError)) if error is not None else planned
    dist.all_gather_object(words, mine, group=group)
    told = {rank: said for rank, said in enumerate(words) if isinstance(said, tuple)}
    reasons = {rank: reason for rank, (reason, _) in told.items()}
    if not reasons:
        reasons = {0: f"the ranks planned differently: {words}"}
    raise SaveFailedError(reasons, any(superseded for _, superseded in told.values())) from error
