"""Which checkpoints may go, and how they go."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from kempner.checkpoint.layout import MANIFEST, CheckpointFolder, dying_name
from kempner.run.files import fsync_directory


def expendable(
    committed: Sequence[int], latest: int | None, keep_last: int, keep_every: int | None = None
) -> list[int]:
    """The steps to delete: all but the `keep_last` newest up to `latest`, never `latest` itself.

    Multiples of `keep_every` steps are kept for good.

    Steps beyond `latest` belong to a branch that a rollback left; they are not counted as kept, and
    are not deleted either: the run sets them aside when it gets there.
    """
    if latest is None:
        return []
    branch = [step for step in sorted(committed) if step <= latest]
    old = branch[: max(0, len(branch) - max(1, keep_last))]
    return [step for step in old if keep_every is None or step % keep_every]


def delete(folder: CheckpointFolder, step: int) -> None:
    """Delete a checkpoint, manifest first: a crash in between leaves none, not a torn one.

    What such a crash leaves may keep its name, without a manifest, or be swept by the next
    attempt. Raises `OSError`.
    """
    (folder.step(step) / MANIFEST).unlink()
    fsync_directory(folder.step(step))
    dying = folder.path / dying_name(step, secrets.token_hex(4))
    folder.step(step).rename(dying)
    shutil.rmtree(dying)


def prune(folder: CheckpointFolder, keep_last: int) -> list[tuple[int, OSError]]:
    """Delete what `expendable` names; return the steps that could not be deleted, and why."""
    failures = []
    for step in expendable(folder.committed(), folder.latest(), keep_last):
        try:
            delete(folder, step)
        except OSError as error:
            failures.append((step, error))
    return failures


def sweep(folder: CheckpointFolder, attempt: int) -> list[tuple[Path, OSError]]:
    """Delete what attempts before `attempt` left unfinished; return what could not be deleted."""
    failures = []
    for leftover in folder.leftovers(before_attempt=attempt):
        try:
            shutil.rmtree(leftover)
        except OSError as error:
            failures.append((leftover, error))
    return failures


def discard(written: Path) -> None:
    """Delete a save that failed, so that its space is there for the next one.

    What cannot be deleted now goes with the next attempt's sweep.
    """
    shutil.rmtree(written, ignore_errors=True)
