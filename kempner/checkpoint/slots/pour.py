"""Writes the steps that slots hold to the files of a checkpoint, once their ranks are gone. Without
torch.

Each process that keeps slots offers the steps in them. If the slots of all ranks hold the same
step, it is written to the folder of a checkpoint in progress, and the committing process gets what
the manifest needs."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kempner.checkpoint.format.manifest import (
    FileEntry,
    TrainState,
    encode_sidecar,
    entry_of,
    sidecar_name,
)
from kempner.checkpoint.format.shard_plan import data_file
from kempner.checkpoint.io.file_writer import write_from, write_stream
from kempner.checkpoint.slots.memory import GIVEN_UP, HeldSlot, Notes, SlotContents
from kempner.run.process.durable_io import join_directory, write_durable


@dataclass(frozen=True)
class Offer:
    """A step in a rank's slot or, `copied`, in a copy on its buddy node; `plan` and `shared` as in
    `SlotContents`, `since` as in `Branch`."""

    rank: int
    world: int
    step: int
    plan: int
    shared: int
    since: int = 0
    copied: bool = False


@dataclass(frozen=True)
class Poured:
    """The manifest's entries of the files that were written for a rank; for rank 0 also the
    manifest's other fields."""

    rank: int
    files: Mapping[str, FileEntry]
    train_state: TrainState | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)


class SlotOwner(Protocol):
    """Keeps slots: those of its ranks, or copies of other nodes'."""

    def slots(self) -> Mapping[int, Sequence[HeldSlot]]:
        """The slots that were ever filled, by rank."""
        ...

    def notes(self) -> Notes | None:
        """Rank 0's, if they are kept."""
        ...


def offers(holder: SlotOwner, nonce: str, copied: bool = False) -> list[Offer]:
    """The steps in the slots of the attempt with this nonce. Raises `OSError`."""
    notes = holder.notes()
    return [
        Offer(
            held.rank,
            held.world,
            held.train_state.step,
            held.plan,
            held.shared,
            held.branch.since,
            copied,
        )
        for _, held in _of_attempt(holder, nonce)
        if held.rank != 0 or (notes is not None and notes.plan == held.plan)
    ]


def pour(
    holder: SlotOwner,
    nonce: str,
    step: int,
    folder: Path,
    ranks: Collection[int] | None = None,
    instead: bool = False,
) -> list[Poured]:
    """Write the files of the ranks whose slots hold `step` into `folder`; only of `ranks` if given.
    `instead`: first delete what another process may have begun to write. Raises `OSError`."""
    found = _of_attempt(holder, nonce)
    held_by = {each[1].rank: each for each in found if each[1].train_state.step == step}
    chosen = [each for rank, each in held_by.items() if ranks is None or rank in ranks]
    join_directory(folder)
    for rank in [each[1].rank for each in chosen] if instead else ():
        _clear(folder, rank, holder.notes())
    with ThreadPoolExecutor(max(1, len(chosen)), "pour") as pool:
        return list(pool.map(lambda each: _pour(each[0], each[1], holder.notes, folder), chosen))


def _of_attempt(holder: SlotOwner, nonce: str) -> list[tuple[HeldSlot, SlotContents]]:
    filled = [(slot, slot.held()) for slots in holder.slots().values() for slot in slots]
    whole = [(slot, held) for slot, held in filled if held is not None]
    return [(slot, held) for slot, held in whole if held.branch.nonce == nonce]


def _pour(
    slot: HeldSlot, held: SlotContents, read_notes: Callable[[], Notes | None], folder: Path
) -> Poured:
    name, sidecar = data_file(held.rank), sidecar_name(held.rank)
    sums = write_from(folder / name, held.image, slot.read)
    if slot.held() != held:
        raise OSError(errno.ESTALE, GIVEN_UP)
    content = encode_sidecar({name: sums})
    write_durable(folder / sidecar, content)
    files = {name: FileEntry(sums.bytes, sums=sidecar), sidecar: entry_of(content)}
    if held.rank != 0:
        return Poured(held.rank, files)
    notes = read_notes()
    assert notes is not None  # else rank 0 would have offered nothing
    for described, text in notes.files.items():
        write_stream(folder / described, memoryview(text))
        files[described] = entry_of(text)
    return Poured(0, files, held.train_state, held.identity)


def _clear(folder: Path, rank: int, notes: Notes | None) -> None:
    described = notes.files if notes is not None and rank == 0 else ()
    for name in (data_file(rank), sidecar_name(rank), *described):
        (folder / name).unlink(missing_ok=True)
