"""Commits what comes from elsewhere as the first checkpoint of a run."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kempner.checkpoint.format.manifest import Manifest
from kempner.checkpoint.format.names import CheckpointFolder, in_progress_name
from kempner.checkpoint.store import commit
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.attempts import Attempt

NO_ATTEMPT = 0
"""The attempt in the names and the manifest of what belongs to no attempt of the run."""


@dataclass(frozen=True)
class _Unclaimed:
    """Stands where an attempt's fence stands in a save: nothing else may have been committed."""

    folder: CheckpointFolder
    step: int
    attempt: Attempt

    def check(self) -> None:
        if self.folder.latest() is not None or set(self.folder.committed()) - {self.step}:
            raise UsageError(
                f"{self.folder.path} has checkpoints already; import into a run that has none"
            )


def commit_first(into: Path, step: int, write: Callable[[Path], Manifest]) -> Path:
    """Commit what `write` puts into the folder that it is given, as the checkpoint of `step`.

    Returns its path below `into`. Raises `UsageError` if `into` has a checkpoint, `OSError` for
    what cannot be written, and what `write` raises; nothing is left then.
    """
    folder = CheckpointFolder(into)
    attempt = Attempt(NO_ATTEMPT, secrets.token_hex(4))
    guard = _Unclaimed(folder, step, attempt)
    guard.check()
    path = into / in_progress_name(step, attempt.number, attempt.nonce)
    path.mkdir(parents=True)
    try:
        return commit.commit(folder, path, write(path), guard, lambda sentence: None)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # the next attempt sweeps what cannot go now
        raise
