"""The files that a rehearsed program writes outside of its run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from kempner.rehearse.records import Record

OF_TENSORS = {".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npy", ".npz"}
"""Endings of files that hold what was trained."""

DEEPEST, MOST, LARGEST = 4, 5000, 1 << 28


@dataclass(frozen=True)
class Contents:
    """Digests of files by their paths."""

    digests: Mapping[str, str] = field(default_factory=dict)

    def differing(self, other: Contents) -> list[str]:
        """The files that both have, with other contents."""
        common = self.digests.keys() & other.digests.keys()
        return sorted(path for path in common if self.digests[path] != other.digests[path])


def listing(folder: Path, scratch: Path) -> dict[str, tuple[int, int]]:
    """Time and size of the files below a folder, as far as they are seen at a glance."""
    found: dict[str, tuple[int, int]] = {}
    for place, folders, names in os.walk(folder):
        here = Path(place)
        deep = len(here.relative_to(folder).parts) >= DEEPEST
        folders[:] = [] if deep else [f for f in folders if not _passed_over(here / f, scratch)]
        for name in names:
            path = here / name
            if path.is_symlink() or len(found) >= MOST:
                continue
            facts = path.stat()
            found[str(path)] = (facts.st_mtime_ns, facts.st_size)
    return found


def _passed_over(folder: Path, scratch: Path) -> bool:
    return folder.name.startswith(".") or folder.name == "__pycache__" or folder == scratch


def changed_files(
    records: Iterable[Record], before: Mapping[str, tuple[int, int]], scratch: Path
) -> list[str]:
    """The files that the program has written, as it told and as its folder shows."""
    told = {path for record in records for path in record.wrote if Path(path).is_file()}
    now = listing(Path.cwd(), scratch)
    return sorted(told | {path for path, facts in now.items() if before.get(path) != facts})


def contents_of(
    records: Iterable[Record], before: Mapping[str, tuple[int, int]], scratch: Path
) -> Contents:
    """Of the files of tensors among them."""
    paths = [path for path in changed_files(records, before, scratch) if _is_compared(Path(path))]
    return Contents({p: xxhash.xxh3_64_hexdigest(Path(p).read_bytes()) for p in paths})


def _is_compared(path: Path) -> bool:
    return path.suffix in OF_TENSORS and path.stat().st_size <= LARGEST
