"""kempner with a bug planted into its commits. Usage: planted_bugs.py BUG train CONFIG...

What is planted is real code in a real run; the checker that catches it is the one that finds
nothing in kempner as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kempner.checkpoint.format import names
from kempner.checkpoint.format.manifest import Manifest, encode
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from kempner.checkpoint.store import commit, retention
from kempner.cli.entry import main
from kempner.run.process.durable_io import fsync_directory, write_durable
from kempner.run.record.attempts import Fence


def no_directory_fsync() -> None:
    """Names are left to the file system."""
    for module in (commit, names, retention):
        module.fsync_directory = lambda path: None  # type: ignore[attr-defined]


def rename_before_manifest() -> None:
    """The name of a checkpoint is there before its manifest."""

    def committed(
        folder: CheckpointFolder,
        written: Path,
        manifest: Manifest,
        fence: Fence,
        report: Callable[[str], None],
    ) -> Path:
        place = folder.step(manifest.train_state.step)
        written.rename(place)
        write_durable(place / MANIFEST, encode(manifest))
        fsync_directory(place)
        fsync_directory(folder.path)
        folder.point_latest(manifest.train_state.step, unique=f"a1-{fence.attempt.nonce}")
        return place

    commit.commit = committed


def prune_before_swap() -> None:
    """The checkpoint that `latest` names is deleted for one that it does not name yet."""
    swap = CheckpointFolder.point_latest

    def swapped(folder: CheckpointFolder, step: int, *rest: Any, **more: Any) -> None:
        for old in folder.committed():
            if old != step:
                retention._withdraw(folder, old)
        swap(folder, step, *rest, **more)

    CheckpointFolder.point_latest = swapped  # type: ignore[method-assign]


BUGS = {
    bug.__name__: bug for bug in (no_directory_fsync, rename_before_manifest, prune_before_swap)
}

if __name__ == "__main__":
    BUGS[sys.argv.pop(1)]()
    main()
