"""Step slots: shared memory that holds a rank's last steps, and outlives the rank.

The process that starts the ranks of a node makes the slots, as files in memory that have no name
(memfd_create(2)), and keeps them open. A rank opens them by way of `/proc` and copies its state
into one after the other. They vanish with the process that made them: nothing is left behind.

A slot is a header of `IMAGE_AT` bytes (magic, length and xxh3_64 of a JSON text, the text) and the
rank's data file, byte for byte. The magic is taken away before anything is overwritten, and put
back last. What all checkpoints have in common beside the data is in a file of its own, the notes.

The board of a rank is 4 KiB of shared memory in which it tells what its buddy is to have. All ranks
pin the same step at once. The process that keeps a rank's slots sends what is pinned to another
node, and then allows the rank to pin another step.

A node keeps two copies of what a rank of another node holds. What arrives takes the place of the
older one, so that the newer one is there until the next is whole.
"""

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
"""Further slots where a buddy keeps copies: of the step that it has, and of the one on its way."""

COPIES = 2  # copies of a rank that its buddy keeps: a whole one, and the one that is on its way
IMAGE_AT = 1 << 16  # bytes before the image
STEP_SLOTS = "KEMPNER_STEP_SLOTS"
"""Variable of a rank: where its slots, notes and board are open, as `PID:FD,FD,FD:FD:FD`; without a
buddy there is no board."""

_MAGIC = b"kempslot"
_HEAD = struct.Struct("<8sIQ")


@dataclass(frozen=True)
class Branch:
    """Which part of a run a step belongs to: the `nonce` of its attempt, and how often that went
    back behind what it had held before. What has a lower number counts no more."""

    nonce: str
    since: int = 0


@dataclass(frozen=True)
class SlotContents:
    """What a slot holds: the state of one rank after a step. `plan` is the digest of what is where,
    `shared` a number for what all ranks must hold alike, `image` the length of the data file in
    bytes. `identity` is what a manifest says of the run, as fields; rank 0 knows it."""

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
        """Whether a slot holds this, which means that it did so all the time."""
        return read_held(descriptor) == self

    @classmethod
    def decode(cls, text: bytes) -> Self:
        fields = json.loads(text)
        state = TrainState.from_fields(fields.pop("train_state"))
        return cls(state, Branch(**fields.pop("branch")), **fields)


class SlotMemory:
    """One slot, mapped into this process. Raises `OSError` and `ValueError` if that fails."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, 0)

    @classmethod
    def grown(cls, descriptor: int, image: int) -> Self:
        """With room for a data file of `image` bytes, and empty."""
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, IMAGE_AT + image)
        return cls(descriptor)

    @property
    def image(self) -> memoryview:
        return memoryview(self._map)[IMAGE_AT:]

    def publish(self, held: SlotContents) -> bool:
        """Say that it now holds this; False if there is no room to say so."""
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
    """A slot as others read it. Who may write it may also empty it at any time, which would kill a
    process that has mapped it: so it is read by a descriptor, of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def held(self) -> SlotContents | None:
        held = read_held(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        return held if held is not None and IMAGE_AT + held.image <= size else None

    def read(self, into: memoryview, at: int) -> None:
        """Fill `into` from byte `at` of the image on. Raises `OSError`, also where it ends."""
        while into:
            count = os.preadv(self._descriptor, [into], IMAGE_AT + at)
            if not count:
                raise OSError(errno.ESTALE, GIVEN_UP)
            into, at = into[count:], at + count


GIVEN_UP = "a step in memory was given up while it was read"


def read_held(descriptor: int) -> SlotContents | None:
    """What a slot holds, whose size another process may change at any time."""
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
    """What rank 0 writes into every checkpoint of a plan: the `files` that say what is where."""

    plan: int
    files: Mapping[str, bytes | memoryview]

    def encode(self) -> bytes:
        """A line of JSON that says how long the files are, and the files."""
        told = {
            "plan": self.plan,
            "files": {name: len(content) for name, content in self.files.items()},
        }
        return b"".join([json.dumps(told).encode() + b"\n", *self.files.values()])

    @classmethod
    def decode(cls, content: bytes) -> Self:
        line, _, rest = content.partition(b"\n")
        told, files, at = json.loads(line), {}, 0
        for name, length in told["files"].items():
            files[name] = rest[at : at + length]
            at += length
        return cls(told["plan"], files)

    def write(self, descriptor: int) -> None:
        """Replace what is there. Raises `OSError`."""
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self.encode(), 8)
        os.pwrite(descriptor, _MAGIC, 0)

    @classmethod
    def read(cls, descriptor: int) -> Self | None:
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return cls.decode(content[len(_MAGIC) :]) if content.startswith(_MAGIC) else None


@dataclass(frozen=True)
class LentSlots:
    """Descriptors of what is kept for a rank; there is a board if a buddy keeps copies."""

    slots: tuple[int, ...]
    notes: int
    board: int | None = None

    @property
    def images(self) -> int:
        """How many images they take, with those on the buddy's node."""
        return len(self.slots) + (0 if self.board is None else COPIES)

    @property
    def taken(self) -> int:
        """Bytes of memory that the slots take now."""
        return sum(512 * os.fstat(slot).st_blocks for slot in self.slots)

    def empty(self) -> None:
        for slot in self.slots:
            os.ftruncate(slot, 0)


def images_of(lent: LentSlots | None, step: int) -> dict[str, MemoryCopy]:
    """The data file of this step that a rank's slots hold, by name; empty if they hold none."""
    found: dict[str, MemoryCopy] = {}
    for slot in () if lent is None else lent.slots:
        held = read_held(slot)
        if held is not None and held.train_state.step == step:
            found[data_file(held.rank)] = MemoryCopy(slot, IMAGE_AT, held.image)
    return found


def _memory(name: str) -> int:
    """Empty memory that others can open; this process has few descriptors at times."""
    return once_there_is_room(partial(os.memfd_create, name))


class SlotHolder:
    """The slots of some ranks, for as long as this lives."""

    def __init__(self) -> None:
        self._lent: dict[int, LentSlots] = {}

    def lend(
        self, rank: int, environ: MutableMapping[str, str], with_buddy: bool = False
    ) -> LentSlots | None:
        """Tell a rank by its environment where its slots are. It gets a board of its own. None, and
        no slots, where no more files can be opened."""
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
        """Those that were ever filled, by rank. Raises `OSError`."""
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
    """Files in memory; all of them, or none. Raises `OSError`."""
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
    """Descriptors of this rank's own; None if it has no slots."""
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
    """The rank's how-manieth pin it is, from 1, and the number of the slot."""

    number: int
    slot: int


class Board:
    """A board, mapped into this process; each field is an aligned word of 64 bits, and has one
    writer. Raises `OSError` and `ValueError` if it cannot be mapped."""

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
        """By the rank: that slot is not overwritten, and is to be sent."""
        self._pin.value = (self.pinned.number + 1) * _SLOTS + slot

    @property
    def may_pin(self) -> bool:
        """Whether what was pinned before has arrived, and may be followed by another."""
        return bool(self._allowed.value > self.pinned.number)

    def allow(self) -> None:
        """By who sends: what is pinned has arrived."""
        self._allowed.value = self.pinned.number + 1

    @property
    def since(self) -> int:
        """As `Branch.since`, of what counts now."""
        return int(self._since.value)

    def go_back(self) -> None:
        """By the rank: what was held so far counts no more."""
        self._since.value += 1


@dataclass
class _Copy:
    descriptor: int
    memory: SlotMemory
    held: SlotContents | None = None


@dataclass
class CopyHolder:
    """The copies that this node keeps for others. Safe to use from several threads."""

    _copies: dict[int, list[_Copy]] = field(default_factory=dict)
    _notes: Notes | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, held: SlotContents) -> SlotMemory:
        """Where such an image is to be received; it holds nothing from now on. Raises `OSError`."""
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
        """It has arrived as it was sent. Rank 0 sends its notes with it, at least once."""
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
    """The lowest is overwritten: the same once more, then what counts no more, then the oldest."""
    if kept is None or kept.branch.nonce != held.branch.nonce:
        return 1, 0
    step = kept.train_state.step
    if (kept.branch, step) == (held.branch, held.train_state.step):
        return 0, 0
    return 2 + kept.branch.since, step
