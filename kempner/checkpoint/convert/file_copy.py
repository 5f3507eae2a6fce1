"""Copies files of a checkpoint as they are, checking every byte on the way."""

from __future__ import annotations

import os
from pathlib import Path

from kempner.checkpoint.convert.tensor_copy import OnBytes
from kempner.checkpoint.format.manifest import Manifest, whole_sum
from kempner.checkpoint.io.file_writer import reserve, write_all
from kempner.checkpoint.io.verified_reader import Cursor, VerifiedFile
from kempner.run.process.durable_io import write_durable
from kempner.run.process.exit_codes import DataError

_SLAB_BLOCKS = 16


def copy_data_file(
    checkpoint: Path, manifest: Manifest, name: str, target: Path, on_bytes: OnBytes
) -> None:
    """Copy a file that has checksums by block, and fsync it.

    Raises `DataError` for a damaged block, and `OSError` for what cannot be written.
    """
    entry = manifest.files[name]
    file = VerifiedFile(checkpoint / name, entry, manifest.files)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    cursor = Cursor(file)
    try:
        reserve(descriptor, entry.bytes)
        step = _SLAB_BLOCKS * file.block_bytes
        buffer = memoryview(bytearray(min(step, entry.bytes)))
        for start in range(0, entry.bytes, step):
            slab = buffer[: min(step, entry.bytes - start)]
            cursor.fill(slab, start // file.block_bytes)
            write_all(descriptor, slab, start)
            on_bytes(len(slab))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        cursor.close()


def copy_small_file(checkpoint: Path, manifest: Manifest, name: str, target: Path) -> None:
    """Copy a file that has one checksum, and fsync it; raises as `copy_data_file`."""
    path = checkpoint / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if whole_sum(content) != manifest.files[name].xxh3_128:
        raise DataError(f"{name}: checksum does not match")
    write_durable(target, content)
