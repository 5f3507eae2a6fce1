"""The files of what is frozen: written twice, then linked from one checkpoint to the next.

Each checkpoint stays complete by itself: whatever reads, copies or deletes one need not know of it,
and the file goes with the last checkpoint that has it. A flipped bit in it damages every checkpoint
that it is linked to, so neighbours never share one: there are two, taken in turn.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kempner.checkpoint.format.manifest import FileSums, decode_sidecar, sum_file
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.io.file_writer import sum_content, write_stream
from kempner.run.process.exit_codes import DataError


class BaseFiles:
    """Those of one rank in the checkpoints of `folder`."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._sound: set[tuple[int, int]] = set()
        """Device and inode of files that this process has written, or read and found sound."""

    def write(self, path: Path, name: str, sidecar: str, content: memoryview) -> FileSums:
        """Have `content` in the file `name` of `path`, by a link if the checkpoint before the
        newest has the same; the checksums of its blocks. Raises `OSError` as `write_stream`.
        """
        sums, target = sum_content(content), path / name
        older = self._folder.committed()[-2:-1]
        if not older or not self._link(self._folder.step(older[0]), name, sidecar, sums, target):
            write_stream(target, content)
            self._sound.add(_identity(target))
        return sums

    def _link(self, older: Path, name: str, sidecar: str, sums: FileSums, target: Path) -> bool:
        """Whether there is now a link to the file in `older`, which has these sums."""
        with suppress(OSError, DataError):  # not there, or no links on this file system: written
            source = older / name
            if decode_sidecar((older / sidecar).read_bytes(), older / sidecar)[1].get(name) != sums:
                return False
            if _identity(source) not in self._sound and sum_file(source) != sums:
                return False
            os.link(source, target)
            self._sound.add(_identity(target))
            return True
        return False


def _identity(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino
