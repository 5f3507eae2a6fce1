"""Step slots: shared memory that holds a rank's last steps, and outlives the rank.

The process that starts a node's ranks creates the slots as files in memory without a name
(memfd_create(2)), and keeps them open. A rank opens them through `/proc` and copies its state into
them in turn. They vanish with the process that created them.

A slot consists of a header of `IMAGE_AT` bytes (magic, length and xxh3_64 of a JSON text, and the
text) and the image, which is the rank's data file, byte for byte. The magic is cleared before
anything is overwritten, and set last. The parts that all checkpoints of a plan share besides the
data are in a separate file, the notes.

The board of a rank is 4 KiB of shared memory in which it says which step its buddy is to get. All
ranks pin the same step at once. The process that keeps the slots sends the pinned step to another
node, and then allows the rank to pin the next.

A node keeps two copies of a slot of another node's rank. A new copy replaces the older one, so that
the newer one stays until the new one is complete."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self

import xxhash

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.format.shard_plan import data_file
from kempner.checkpoint.io.verify import MemoryCopy
from kempner.run.output.logs import logger
from kempner.run.process.retry import describe
from kempner.run.process.threads import once_there_is_room

SLOTS = 3  # slots of a rank: two in turn, and one more for a save that is being written meanwhile
PINNED = 2
"""Additional slots with a buddy: for the step that it has, and the one being sent."""

COPIES = 2  # copies of a rank that its buddy keeps: a complete one, and the one being received
IMAGE_AT = 1 << 16  # bytes before the image
STEP_SLOTS = "KEMPNER_STEP_SLOTS"
"""Environment variable of a rank: process and descriptors of its slots, notes and board, as
`PID:FD,FD,FD:FD:FD`; without a buddy the last is empty."""

_MAGIC = b"kempslot"
_HEAD = struct.Struct("<8sIQ")


@dataclass(frozen=True)
class Branch:
    """The part of a run to which a step belongs: the `nonce` of its attempt, and in `since` the
    number of rollbacks before it. Steps with a lower number are invalid."""

    nonce: str
    since: int = 0


@dataclass(frozen=True)
class SlotContents:
    """The contents of a slot: the state of one rank after a step. `plan` is the digest of the shard
    plan, `shared` that of the state that must be the same on all ranks, `image` the length of the
    data file in bytes. `identity` has the manifest's fields about the run; only on rank 0."""

    train_state: TrainState
    branch: Branch
    rank: int
    world: int
    plan: int
    shared: int
    image: int
    identity: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def is_in(self, descriptor: int) -> bool:
        """Whether a slot holds this now, and so has not been overwritten since."""
        return read_held(descriptor) == self

    @classmethod
    def decode(cls, text: bytes) -> Self:
        fields = json.loads(text)
        state = TrainState.from_fields(fields.pop("train_state"))
        return cls(state, Branch(**fields.pop("branch")), **fields)


class SlotMemory:
    """A slot mapped into this process. Raises `OSError` and `ValueError` if that fails."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, 0)

    @classmethod
    def grown(cls, descriptor: int, image: int) -> Self:
        """Resize the slot for a data file of `image` bytes, and empty it."""
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, IMAGE_AT + image)
        return cls(descriptor)

    @property
    def image(self) -> memoryview:
        return memoryview(self._map)[IMAGE_AT:]

    def publish(self, held: SlotContents) -> bool:
        """Mark the slot as holding `held`; False if the header has no room for it."""
        text = held.encode()
        if _HEAD.size + len(text) > IMAGE_AT:
            return False
        self._map[_HEAD.size : _HEAD.size + len(text)] = text
        self._map[: _HEAD.size] = _HEAD.pack(b"", len(text), xxhash.xxh3_64_intdigest(text))
        self._map[: len(_MAGIC)] = _MAGIC
        return True

    def withdraw(self) -> None:
        self._map[: len(_MAGIC)] = bytes(len(_MAGIC))

    def held(self) -> SlotContents | None:
        text = _text(self._map[:IMAGE_AT])
        held = None if text is None else SlotContents.decode(text)
        return held if held is not None and held.image <= len(self.image) else None


class HeldSlot:
    """A slot as other processes read it: through a descriptor, since its writer may truncate it at
    any time, which would kill a process that has mapped it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def held(self) -> SlotContents | None:
        held = read_held(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        return held if held is not None and IMAGE_AT + held.image <= size else None

    def read(self, into: memoryview, at: int) -> None:
        """Fill `into` from byte `at` of the image. Raises `OSError`, also at the end of the
        image."""
        while into:
            count = os.preadv(self._descriptor, [into], IMAGE_AT + at)
            if not count:
                raise OSError(errno.ESTALE, GIVEN_UP)
            into, at = into[count:], at + count


GIVEN_UP = "a step in memory was given up while it was read"


def read_held(descriptor: int) -> SlotContents | None:
    """The contents of a slot, whose size another process may change at any time; None if empty."""
    text = _text(os.pread(descriptor, IMAGE_AT, 0))
    return None if text is None else SlotContents.decode(text)


def _text(header: bytes) -> bytes | None:
    if len(header) < _HEAD.size:
        return None
    magic, length, summed = _HEAD.unpack_from(header)
    text = header[_HEAD.size : _HEAD.size + length]
    whole = magic == _MAGIC and xxhash.xxh3_64_intdigest(text) == summed
    return text if whole else None


@dataclass(frozen=True)
class Notes:
    """The index files that rank 0 writes into every checkpoint of a plan."""

    plan: int
    files: Mapping[str, bytes | memoryview]

    def encode(self) -> bytes:
        """A line of JSON with the lengths of the files, then the files."""
        lengths = {
            "plan": self.plan,
            "files": {name: len(content) for name, content in self.files.items()},
        }
        return b"".join([json.dumps(lengths).encode() + b"\n", *self.files.values()])

    @classmethod
    def decode(cls, content: bytes) -> Self:
        line, _, rest = content.partition(b"\n")
        lengths, files, at = json.loads(line), {}, 0
        for name, length in lengths["files"].items():
            files[name] = rest[at : at + length]
            at += length
        return cls(lengths["plan"], files)

    def write(self, descriptor: int) -> None:
        """Replace the notes. Raises `OSError`."""
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self.encode(), 8)
        os.pwrite(descriptor, _MAGIC, 0)

    @classmethod
    def read(cls, descriptor: int) -> Self | None:
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return cls.decode(content[len(_MAGIC) :]) if content.startswith(_MAGIC) else None


@dataclass(frozen=True)
class LentSlots:
    """The descriptors of a rank's slots, notes and, with a buddy, board."""

    slots: tuple[int, ...]
    notes: int
    board: int | None = None

    @property
    def images(self) -> int:
        """The number of images in memory, including those on the buddy node."""
        return len(self.slots) + (0 if self.board is None else COPIES)

    @property
    def taken(self) -> int:
        """Bytes of memory that the slots use now."""
        return sum(512 * os.fstat(slot).st_blocks for slot in self.slots)

    def empty(self) -> None:
        for slot in self.slots:
            os.ftruncate(slot, 0)


def images_of(lent: LentSlots | None, step: int) -> dict[str, MemoryCopy]:
    """The rank's data file of this step in its slots, by name; empty if no slot holds it."""
    found: dict[str, MemoryCopy] = {}
    for slot in () if lent is None else lent.slots:
        held = read_held(slot)
        if held is not None and held.train_state.step == step:
            found[data_file(held.rank)] = MemoryCopy(slot, IMAGE_AT, held.image)
    return found


def _memory(name: str) -> int:
    """Create an empty file in memory; retried, since descriptors may be short for a moment."""
    return once_there_is_room(partial(os.memfd_create, name))


class SlotHolder:
    """Creates and keeps the slots of a node's ranks."""

    def __init__(self) -> None:
        self._lent: dict[int, LentSlots] = {}

    def lend(
        self, rank: int, environ: MutableMapping[str, str], with_buddy: bool = False
    ) -> LentSlots | None:
        """Set `environ` so that a rank finds its slots; with a new board if it has a buddy. None,
        and no slots, if no more files can be opened."""
        try:
            return self._lend(rank, environ, with_buddy)
        except OSError as error:
            logger().warning("no steps are kept in memory", rank=rank, error=describe(error))
            return None

    def _lend(self, rank: int, environ: MutableMapping[str, str], with_buddy: bool) -> LentSlots:
        name, before = f"kempner-{rank}", self._lent.get(rank)
        if before is not None and len(before.slots) != _slots(with_buddy):
            self._close_slots(rank)
            before = None
        if before is None:
            *slots, notes = _create([*range(_slots(with_buddy)), "notes"], name)
            before = LentSlots(tuple(slots), notes)
            self._lent[rank] = before
        if before.board is not None:
            os.close(before.board)
        board = _memory(f"{name}-board") if with_buddy else None
        lent = self._lent[rank] = replace(before, board=board)
        listed = ",".join(map(str, lent.slots))
        environ[STEP_SLOTS] = (
            f"{os.getpid()}:{listed}:{lent.notes}:{'' if board is None else board}"
        )
        return lent

    def keep_only(self, ranks: Sequence[int]) -> None:
        for rank in self._lent.keys() - set(ranks):
            self._close_slots(rank)

    def slots(self) -> dict[int, list[HeldSlot]]:
        """The slots that were ever filled, by rank. Raises `OSError`."""
        used: dict[int, list[HeldSlot]] = {}
        for rank, lent in self._lent.items():
            grown = [slot for slot in lent.slots if os.fstat(slot).st_size > IMAGE_AT]
            used[rank] = [HeldSlot(slot) for slot in grown]
        return used

    def notes(self) -> Notes | None:
        return Notes.read(self._lent[0].notes) if 0 in self._lent else None

    def boards(self) -> list[int]:
        return [lent.board for lent in self._lent.values() if lent.board is not None]

    def _close_slots(self, rank: int) -> None:
        lent = self._lent.pop(rank)
        for descriptor in (*lent.slots, lent.notes, lent.board):
            if descriptor is not None:
                os.close(descriptor)


def _create(kinds: Sequence[object], name: str) -> list[int]:
    """Create files in memory, all or none. Raises `OSError`."""
    made: list[int] = []
    try:
        for kind in kinds:
            made.append(_memory(f"{name}-{kind}"))
    except OSError:
        for descriptor in made:
            os.close(descriptor)
        raise
    return made


def open_slots(environ: Mapping[str, str]) -> LentSlots | None:
    """Open the slots of this rank; None if it has none."""
    owner, *lists = environ.get(STEP_SLOTS, "").split(":")
    opened: list[int] = []
    try:
        for descriptor in filter(None, ",".join(lists).split(",")):
            opened.append(os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        while opened:
            os.close(opened.pop())
    if not opened:
        return None
    board = opened.pop() if lists[-1] else None
    return LentSlots(tuple(opened[:-1]), opened[-1], board)


def _slots(with_buddy: bool) -> int:
    return SLOTS + (PINNED if with_buddy else 0)


SIZE = 4096
_SLOTS = 16


@dataclass(frozen=True)
class Pin:
    """A pinned slot; `number` counts the rank's pins from 1."""

    number: int
    slot: int


class Board:
    """A board mapped into this process; each field is an aligned 64-bit word with one writer.
    Raises `OSError` and `ValueError` if it cannot be mapped."""

    def __init__(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size < SIZE:
            os.ftruncate(descriptor, SIZE)
        words = mmap.mmap(descriptor, SIZE)
        self._pin, self._allowed, self._since = (
            ctypes.c_uint64.from_buffer(words, 64 * n) for n in range(3)
        )

    @property
    def pinned(self) -> Pin:
        return Pin(*divmod(self._pin.value, _SLOTS))

    def pin(self, slot: int) -> None:
        """Called by the rank: `slot` will not be overwritten, and is to be sent."""
        self._pin.value = (self.pinned.number + 1) * _SLOTS + slot

    @property
    def may_pin(self) -> bool:
        """Whether the pinned step has arrived, so that another may be pinned."""
        return bool(self._allowed.value > self.pinned.number)

    def allow(self) -> None:
        """Called by the sender: the pinned step has arrived."""
        self._allowed.value = self.pinned.number + 1

    @property
    def since(self) -> int:
        """The present `Branch.since`."""
        return int(self._since.value)

    def go_back(self) -> None:
        """Called by the rank at a rollback: invalidate all steps held so far."""
        self._since.value += 1


@dataclass
class _Copy:
    descriptor: int
    memory: SlotMemory
    held: SlotContents | None = None


@dataclass
class CopyHolder:
    """The copies that this node keeps for others; thread-safe."""

    _copies: dict[int, list[_Copy]] = field(default_factory=dict)
    _notes: Notes | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, held: SlotContents) -> SlotMemory:
        """The memory into which to receive such an image; empty from now on. Raises `OSError`."""
        with self._lock:
            copies = self._copies.setdefault(held.rank, [])
            if len(copies) < COPIES and not any(_same(copy.held, held) for copy in copies):
                copies.append(_new(held))
            copy = min(copies, key=lambda copy: _worth(copy.held, held))
            if len(copy.memory.image) != held.image:
                os.close(copy.descriptor)
                copies.remove(copy)
                copy = _new(held)
                copies.append(copy)
            copy.memory.withdraw()
            copy.held = None
            return copy.memory

    def publish(self, memory: SlotMemory, held: SlotContents, notes: Notes | None) -> None:
        """Note that a copy has arrived. Rank 0 also sends its notes, at least once."""
        with self._lock:
            self._notes = notes or self._notes
            memory.publish(held)
            for copy in self._copies.get(held.rank, ()):
                if copy.memory is memory:
                    copy.held = held

    def clear(self) -> None:
        with self._lock:
            for copies in self._copies.values():
                for copy in copies:
                    os.close(copy.descriptor)
            self._copies, self._notes = {}, None

    def slots(self) -> dict[int, list[HeldSlot]]:
        with self._lock:
            kept = self._copies.items()
            return {rank: [HeldSlot(copy.descriptor) for copy in copies] for rank, copies in kept}

    def notes(self) -> Notes | None:
        with self._lock:
            return self._notes


def _new(held: SlotContents) -> _Copy:
    descriptor = os.memfd_create(f"kempner-copy-{held.rank}")
    return _Copy(descriptor, SlotMemory.grown(descriptor, held.image))


def _same(kept: SlotContents | None, held: SlotContents) -> bool:
    return kept is not None and _worth(kept, held) == (0, 0)


def _worth(kept: SlotContents | None, held: SlotContents) -> tuple[int, int]:
    """Sort key; the lowest is overwritten: the same step, then invalid ones, then the oldest."""
    if kept is None or kept.branch.nonce != held.branch.nonce:
        return 1, 0
    step = kept.train_state.step
    if (kept.branch, step) == (held.branch, held.train_state.step):
        return 0, 0
    return 2 + kept.branch.since, step
