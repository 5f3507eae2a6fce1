"""Writes one save through DCP's own writer, sums the files, and commits on rank 0.

DCP runs `write_data` on every rank, gathers what each returns, runs `finish` on the coordinator,
and tells all ranks whether it succeeded: a failure anywhere fails the save everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kempner.checkpoint.manifest import (
    FileEntry,
    encode_sidecar,
    sidecar_name,
    sum_file,
    whole_sum,
)
from kempner.checkpoint.reader import METADATA
from kempner.run.files import write_durable


@dataclass(frozen=True)
class RankWrite:
    """What one rank wrote: DCP's results, and its files as the manifest lists them."""

    results: list[WriteResult]
    files: Mapping[str, FileEntry]


class CommittingWriter(FileSystemWriter):
    """Writes into a fresh folder; `commit` gets the complete list of files, on rank 0."""

    def __init__(
        self, path: Path, rank: int, commit: Callable[[Mapping[str, FileEntry]], None]
    ) -> None:
        super().__init__(path, overwrite=False)
        self._folder = path
        self._rank = rank
        self._commit = commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write and fsync this rank's files and the sidecar with their block sums."""
        results = super().write_data(plan, planner).wait()
        written = sorted(self._folder.glob(f"__{self._rank}_*"))
        sums = {path.name: sum_file(path) for path in written}
        sidecar, content = sidecar_name(self._rank), encode_sidecar(sums)
        write_durable(self._folder / sidecar, content)
        files = {name: FileEntry(bytes=s.bytes, sums=sidecar) for name, s in sums.items()}
        files[sidecar] = _whole_entry(content)
        done: Future[Any] = Future()
        done.set_result(RankWrite(results, files))
        return done

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write DCP's metadata, then the manifest, and commit."""
        writes: list[RankWrite] = results
        super().finish(metadata, [write.results for write in writes])
        files = {name: entry for write in writes for name, entry in write.files.items()}
        files[METADATA] = _whole_entry((self._folder / METADATA).read_bytes())
        self._commit(files)


def _whole_entry(content: bytes) -> FileEntry:
    return FileEntry(bytes=len(content), xxh3_128=whole_sum(content))
