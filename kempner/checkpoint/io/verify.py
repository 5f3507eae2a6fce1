"""Verifies a checkpoint by reading every byte; needs no torch.

Stores results of `verify` beside the checkpoints, since a commit never changes.

One JSON object a line. A checkpoint is known by the digest of its manifest, so that a finding
follows it through a rename and never speaks of another one that came to have its name.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from kempner.checkpoint.format.manifest import (
    BLOCK_BYTES,
    FileEntry,
    FileSums,
    Manifest,
    decode_sidecar,
    digest,
    read,
    whole_sum,
)
from kempner.checkpoint.format.names import MANIFEST, VERIFIED
from kempner.checkpoint.io.patient_reads import read_listed
from kempner.run.process.durable_io import append_line
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import empty
from kempner.run.record.ledger import read_lines

READERS = 4
"""Files that are read at a time."""

OnRead = Callable[[int], None]
"""Told how many bytes more were read; from several threads."""


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong: the file, and a sentence that names the block if there is one."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def verify(checkpoint: Path, on_read: OnRead = lambda count: None) -> list[Damage]:
    """Everything that is wrong with a checkpoint; empty if every byte is as committed.

    Raises as `StorageWaits.retry` where it cannot be read now.
    """
    try:
        manifest = read(checkpoint)
    except DataError as error:
        return [Damage(MANIFEST, str(error))]
    interrupted = threading.Event()

    def check(name: str) -> list[Damage]:
        return [] if interrupted.is_set() else verify_files(checkpoint, manifest, [name], count)

    def count(length: int) -> None:
        if interrupted.is_set():
            raise DataError("was not read completely")
        on_read(length)

    with ThreadPoolExecutor(READERS, "verifier") as pool:
        try:
            return [damage for found in pool.map(check, manifest.files) for damage in found]
        finally:
            interrupted.set()  # without it, Ctrl-C would wait for the files being read


def verify_files(
    checkpoint: Path,
    manifest: Manifest,
    names: Iterable[str],
    on_read: OnRead = lambda count: None,
) -> list[Damage]:
    """Check the named files against the manifest, so that ranks can share the reading.

    Raises as `StorageWaits.retry` where one cannot be read now: that is no damage.
    """
    damages: list[Damage] = []
    for name in names:
        entry = manifest.files.get(name)
        if entry is None:
            damages.append(Damage(name, "is not in the manifest"))
            continue
        try:
            if entry.sums is None:
                _check_sum(checkpoint / name, entry, on_read)
                continue
            block_bytes, sums = _load_sidecar(checkpoint, manifest.files, entry.sums)
            _check_blocks(checkpoint / name, entry, block_bytes, sums, on_read)
        except DataError as error:
            damages.append(Damage(name, str(error)))
    return damages


def _load_sidecar(
    checkpoint: Path, files: Mapping[str, FileEntry], name: str
) -> tuple[int, dict[str, FileSums]]:
    if name not in files:
        raise DataError(f"its block checksums, {name}, are not in the manifest")
    try:
        content = read_whole(checkpoint / name, files[name])
    except DataError as error:
        raise DataError(f"its block checksums, {name}: {error}") from error
    return decode_sidecar(content, checkpoint / name)


def read_checked(checkpoint: Path, manifest: Manifest, name: str) -> bytes | None:
    """A file of a checkpoint as it was committed; None if it has none of that name.

    Raises `DataError` unless every byte is, and as `StorageWaits.retry`.
    """
    entry = manifest.files.get(name)
    if entry is None:
        return None
    for damage in verify_files(checkpoint, manifest, [name]):
        raise DataError(str(damage))
    return read_listed(checkpoint / name, partial(_read_whole, checkpoint / name, entry))


def read_whole(path: Path, entry: FileEntry) -> bytes:
    """A small file that has a sum of its own. Raises `DataError` unless it is as committed."""
    content = read_listed(path, partial(_read_whole, path, entry))
    _check_length(len(content), entry)
    if whole_sum(content) != entry.xxh3_128:
        raise DataError("checksum does not match")
    return content


def _read_whole(path: Path, entry: FileEntry) -> bytes:
    content = path.read_bytes()
    if entry.bytes and not content:
        raise empty(path, entry.bytes)
    return content


def _check_sum(path: Path, entry: FileEntry, on_read: OnRead) -> None:
    """As `read_whole`, but of a file of any size: `.metadata` may be hundreds of megabytes."""
    if read_listed(path, partial(_sum_whole, path, entry, on_read)) != entry.xxh3_128:
        raise DataError("checksum does not match")


def _sum_whole(path: Path, entry: FileEntry, on_read: OnRead) -> str:
    """The checksum of a file. Raises `OSError` if it cannot be read."""
    total = xxhash.xxh3_128()
    with open(path, "rb") as file:
        _check_open_length(file.fileno(), path, entry)
        while block := file.read(BLOCK_BYTES):
            total.update(block)
            on_read(len(block))
    return total.hexdigest()


def _check_blocks(
    path: Path,
    entry: FileEntry,
    block_bytes: int,
    sums: Mapping[str, FileSums],
    on_read: OnRead,
) -> None:
    """Read a file to its end. Raises `DataError` that names the first block that is not right."""
    expected = sums.get(path.name)
    if expected is None or expected.bytes != entry.bytes:
        raise DataError("its block checksums do not list this file")
    damaged = read_listed(
        path, partial(_damaged_blocks, path, entry, expected, block_bytes, on_read)
    )
    if damaged:
        more = f", and neither do {len(damaged) - 1} more blocks" if damaged[1:] else ""
        first, at = damaged[0], damaged[0] * block_bytes
        raise DataError(f"block {first} (from byte {at}) does not match its checksum{more}")


def _damaged_blocks(
    path: Path, entry: FileEntry, expected: FileSums, block_bytes: int, on_read: OnRead
) -> list[int]:
    """The numbers of the blocks that are wrong. Raises `OSError` if the file cannot be read."""
    damaged = []
    with open(path, "rb") as file:
        _check_open_length(file.fileno(), path, entry)
        for number, digest in enumerate(expected.blocks):
            block = file.read(block_bytes)
            if xxhash.xxh3_64_hexdigest(block) != digest:
                damaged.append(number)
            on_read(len(block))
    return damaged


def _check_open_length(descriptor: int, path: Path, entry: FileEntry) -> None:
    length = os.fstat(descriptor).st_size
    if entry.bytes and not length:
        raise empty(path, entry.bytes)
    _check_length(length, entry)


def _check_length(length: int, entry: FileEntry) -> None:
    if length != entry.bytes:
        raise DataError(f"has {length} bytes instead of {entry.bytes}")


@dataclass(frozen=True)
class Verification:
    """The outcome of reading every byte at `time` (Unix, seconds): how many files are damaged."""

    time: float
    damaged: int


def record(folder: Path, manifest: Manifest, damages: Sequence[Damage], now: float) -> None:
    """Keep what a verification found. Raises `OSError`."""
    entry = {"time": round(now, 3), "manifest": digest(manifest), "damaged": len(damages)}
    append_line(folder / VERIFIED, json.dumps(entry))


def read_findings(folder: Path) -> dict[str, Verification]:
    """The last finding on each checkpoint, by its manifest's digest."""
    found = {}
    for line in read_lines(folder / VERIFIED):
        try:
            found[str(line["manifest"])] = Verification(float(line["time"]), int(line["damaged"]))
        except (KeyError, TypeError, ValueError):
            continue  # not a line of ours
    return found
