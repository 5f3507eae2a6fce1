"""How a copy of a slot travels from the agent of one node to that of another.

The connection opens as every other one (`run.control.protocol`), with the agents' secret. Then, for
each copy: lengths, a header's text, the notes if they are new, the image, and a trailer with the
image's xxh3_64 and whether the slot still held the same at the end. One byte comes back: whether
the copy is whole.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

import xxhash

from kempner.checkpoint.slots.memory import IMAGE_AT, Notes, SlotContents, SlotMemory
from kempner.run.control.protocol import MessageError

SILENT = 10.0
"""Seconds without a byte after which a connection is given up."""

CHUNK = 4 << 20
"""Bytes that are sent at once."""

NOTES_LIMIT = 1 << 30
"""Bytes of notes above which a message is taken for invalid."""

ARRIVED, VOID, DAMAGED = b"a", b"v", b"d"
"""What comes back: it is whole; the sender has given it up; it is not what was sent."""

_LENGTHS, _TRAILER = struct.Struct("<IQ"), struct.Struct("<?Q")


@dataclass(frozen=True)
class Incoming:
    """What a copy will be."""

    held: SlotContents
    notes: Notes | None


def send_copy(wire: socket.socket, slot: int, held: SlotContents, notes: Notes | None) -> bytes:
    """Send what a slot holds, as long as it does; the answer. Raises `OSError`."""
    text, told = held.encode(), b"" if notes is None else notes.encode()
    wire.sendall(_LENGTHS.pack(len(text), len(told)) + text)
    wire.sendall(told)
    buffer, summed, at = bytearray(CHUNK), xxhash.xxh3_64(), 0
    view = memoryview(buffer)
    while at < held.image:
        wanted = view[: min(CHUNK, held.image - at)]
        count = os.preadv(slot, [wanted], IMAGE_AT + at)
        part = wanted[:count] if count else wanted  # it was made anew: the trailer will say so
        summed.update(part)
        wire.sendall(part)
        at += len(part)
    same = held.is_in(slot)
    wire.sendall(_TRAILER.pack(same, summed.intdigest()))
    return _exactly(wire, 1)


def receive_header(wire: socket.socket) -> Incoming | None:
    """What comes next; None if nothing does. Raises `OSError` and `MessageError`."""
    first = wire.recv(1)
    if not first:
        return None
    length, noted = _LENGTHS.unpack(first + _exactly(wire, _LENGTHS.size - 1))
    if length > IMAGE_AT or noted > NOTES_LIMIT:
        raise MessageError(f"a header of {length} and notes of {noted} bytes")
    try:
        held = SlotContents.decode(_exactly(wire, length))
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError(f"a header that cannot be read: {error}") from None
    return Incoming(held, Notes.decode(_exactly(wire, noted)) if noted else None)


def receive_image(wire: socket.socket, memory: SlotMemory, length: int) -> bytes:
    """Take in the image and the trailer; the answer to give. Raises `OSError`."""
    image, summed, at = memory.image[:length], xxhash.xxh3_64(), 0
    while at < length:
        count = wire.recv_into(image[at : at + CHUNK])
        if not count:
            raise ConnectionResetError("the other side has hung up")
        summed.update(image[at : at + count])
        at += count
    same, digest = _TRAILER.unpack(_exactly(wire, _TRAILER.size))
    if not same:
        return VOID
    return ARRIVED if digest == summed.intdigest() else DAMAGED


def _exactly(wire: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = wire.recv(min(CHUNK, length - len(received)))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        received += part
    return bytes(received)
