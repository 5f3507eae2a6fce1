"""Commits a written folder as a checkpoint. The order of its operations is the promise:

    all ranks' files seen -> manifest written and fsynced -> folder fsynced -> fence
    -> step-<s> by rename -> parent fsynced -> fence -> `latest` swapped by rename -> parent fsynced

A crash after any of these leaves either the previous commit or the new one as the newest, never a
torn one; and an attempt that was superseded changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from kempner.checkpoint.format.manifest import Manifest, encode
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from kempner.checkpoint.store.selection import left_behind
from kempner.run.process.durable_io import (
    LATE,
    await_entry,
    fsync_directory,
    holds,
    rename,
    write_durable,
)
from kempner.run.record.attempts import Attempt


class Guard(Protocol):
    """What a commit asks before each step that cannot be taken back: an attempt's `Fence`."""

    @property
    def attempt(self) -> Attempt:
        """Who is committing."""
        ...

    def check(self) -> None:
        """Raise a `RunError` if that one must not commit any more."""
        ...


def commit(
    folder: CheckpointFolder,
    written: Path,
    manifest: Manifest,
    fence: Guard,
    report: Callable[[str], None],
) -> Path:
    """Turn `written`, whose data files are durable, into the newest checkpoint; return its path.

    Checkpoints up to that step that `latest` does not reach were left by a branch that a rollback
    or a fallback abandoned: they are set aside first, and `report` gets a sentence for each.
    Otherwise they would be taken for the live branch's once `latest` has passed them. Raises
    `SupersededError` if a newer attempt owns the run, and `OSError`, also if a file that another
    host has written does not come to be seen here.
    """
    step, attempt = manifest.train_state.step, fence.attempt
    await_files(written, manifest.files)
    place, content = folder.step(manifest.train_state.step), encode(manifest)
    write_durable(written / MANIFEST, content)
    fsync_directory(written)
    fence.check()
    for left in left_behind(folder.committed(), folder.latest(), step):
        aside = folder.set_aside(left, "abandoned", attempt.number)
        report(f"step {left} was committed before; the earlier checkpoint is now {aside.name}")
    rename(written, place, arrived=lambda: holds(place / MANIFEST, content))
    fsync_directory(folder.path)
    fence.check()
    folder.point_latest(step, unique=f"a{attempt.number}-{attempt.nonce}")
    return place


def await_files(written: Path, names: Iterable[str], seconds: float = LATE) -> None:
    """Wait until the files of all ranks are seen in a folder, for so many seconds in all.

    A node on which it is another folder of the same name (a file system that is not mounted there,
    say) writes its files where nobody finds them again. Raises `FileNotFoundError`.
    """
    end = time.monotonic() + seconds
    for name in names:
        # Not a listing of the folder, which network file systems keep for a while.
        if not await_entry(written / name, end - time.monotonic()):
            raise FileNotFoundError(
                f"its rank has written {name}, but rank 0 does not see it in {written}: is that on "
                "a file system that all nodes share?"
            )
