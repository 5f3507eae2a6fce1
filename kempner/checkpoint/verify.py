"""Is a checkpoint what was written? Reads every byte, and needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kempner.checkpoint.layout import MANIFEST
from kempner.checkpoint.manifest import (
    FileEntry,
    FileSums,
    Manifest,
    decode_sidecar,
    read,
    whole_sum,
)
from kempner.run.exit_codes import DataError


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong: the file, and a sentence that names the block if there is one."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def verify(checkpoint: Path) -> list[Damage]:
    """Everything that is wrong with a checkpoint; empty if every byte is as committed."""
    try:
        manifest = read(checkpoint)
    except DataError as error:
        return [Damage(MANIFEST, str(error))]
    return verify_files(checkpoint, manifest, manifest.files)


def verify_files(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> list[Damage]:
    """Check the named files against the manifest, so that ranks can share the reading."""
    damages: list[Damage] = []
    sidecars: dict[str, tuple[int, dict[str, FileSums]]] = {}
    for name in names:
        entry = manifest.files.get(name)
        if entry is None:
            damages.append(Damage(name, "is not in the manifest"))
            continue
        try:
            if entry.sums is None:
                _check_whole(checkpoint / name, entry)
                continue
            if entry.sums not in sidecars:
                sidecars[entry.sums] = _load_sidecar(checkpoint, manifest.files, entry.sums)
            block_bytes, sums = sidecars[entry.sums]
            _check_blocks(checkpoint / name, entry, block_bytes, sums)
        except DataError as error:
            damages.append(Damage(name, str(error)))
        except OSError as error:
            damages.append(Damage(name, f"cannot be read: {error.strerror}"))
    return damages


def _load_sidecar(
    checkpoint: Path, files: Mapping[str, FileEntry], name: str
) -> tuple[int, dict[str, FileSums]]:
    if name not in files:
        raise DataError(f"its block sums {name} are not in the manifest")
    try:
        content = _check_whole(checkpoint / name, files[name])
    except DataError as error:
        raise DataError(f"its block sums, {name}: {error}") from error
    return decode_sidecar(content, checkpoint / name)


def _check_whole(path: Path, entry: FileEntry) -> bytes:
    content = path.read_bytes()
    _check_length(len(content), entry)
    if whole_sum(content) != entry.xxh3_128:
        raise DataError("checksum does not match")
    return content


def _check_blocks(
    path: Path, entry: FileEntry, block_bytes: int, sums: Mapping[str, FileSums]
) -> None:
    expected = sums.get(path.name)
    if expected is None or expected.bytes != entry.bytes:
        raise DataError("its block sums do not speak of this file")
    with open(path, "rb") as file:
        _check_length(os.fstat(file.fileno()).st_size, entry)
        for number, digest in enumerate(expected.blocks):
            if xxhash.xxh3_64_hexdigest(file.read(block_bytes)) != digest:
                at = number * block_bytes
                raise DataError(f"block {number} (from byte {at}) does not match its checksum")


def _check_length(length: int, entry: FileEntry) -> None:
    if length != entry.bytes:
        raise DataError(f"has {length} bytes instead of {entry.bytes}")
