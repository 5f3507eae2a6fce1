"""Retention: which checkpoints to delete, and how.

A deletion has three acts: the manifest is renamed to `manifest.withdrawn.json` (from then on there
is no checkpoint), the folder is renamed to a name that says it is dying, and its content is
deleted. Where a crash or an error ends it, a later pass goes on.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kempner.checkpoint.format.names import (
    MANIFEST,
    WITHDRAWN,
    CheckpointFolder,
    dying_name,
    leftover_step,
)
from kempner.checkpoint.io.file_writer import yield_to_training
from kempner.checkpoint.store.read_marker import Readers
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import fsync_directory
from kempner.run.record.attempts import Fence, SupersededError


@dataclass(frozen=True)
class Keep:
    """How many of the newest checkpoints to keep, which steps' multiples to keep for good, and
    which steps for as long as they are named here.
    """

    last: int
    every: int | None = None
    pinned: frozenset[int] = frozenset()


def expendable(committed: Sequence[int], latest: int | None, keep: Keep) -> list[int]:
    """The steps to delete: all up to `latest` that `keep` does not want, never `latest` itself.

    Steps beyond `latest` belong to a branch that a rollback left; they are not counted as kept, and
    are not deleted either: the run sets them aside when it gets there.
    """
    if latest is None:
        return []
    branch = [step for step in sorted(committed) if step <= latest]
    old = branch[: max(0, len(branch) - keep.last)]
    old = [step for step in old if step not in keep.pinned]
    return [step for step in old if keep.every is None or step % keep.every]


def prune(
    folder: CheckpointFolder, keep: Keep, readers: Readers, check: Callable[[], None]
) -> dict[int, OSError]:
    """One pass: delete what `expendable` names, and what earlier passes began.

    A checkpoint that is being read is left for a later pass. `check` is called before each one and
    may raise to end the pass. Returns the steps that could not be deleted, and why.
    """
    failures: dict[int, OSError] = {}

    def attempt(step: int, act: Callable[[], None]) -> None:
        check()
        try:
            if step != folder.latest() and not readers.are_reading(step):
                act()
        except OSError as error:
            failures[step] = error

    for step in expendable(folder.committed(), folder.latest(), keep):
        attempt(step, partial(_withdraw, folder, step))
    # Looked at again: a reader that came between the look and the withdrawal has its manifest and
    # goes on reading, one that comes now finds none.
    for step in folder.withdrawn():
        attempt(step, partial(_bury, folder, step))
    for dying in folder.leftovers(before_attempt=1):
        attempt(leftover_step(dying), partial(shutil.rmtree, dying))
    return failures


def _withdraw(folder: CheckpointFolder, step: int) -> None:
    path = folder.step(step)
    (path / MANIFEST).rename(path / WITHDRAWN)
    fsync_directory(path)


def _bury(folder: CheckpointFolder, step: int) -> None:
    folder.step(step).rename(folder.path / dying_name(step, secrets.token_hex(4)))


class Pruner:
    """Prunes on a thread of its own, at the lowest priority, so that no commit waits for it.

    Used by one thread of rank 0. What cannot be deleted is said once per step, and tried again at
    every later pass.
    """

    def __init__(self, folder: CheckpointFolder, keep: Keep, fence: Fence) -> None:
        self._folder, self.keep, self._fence = folder, keep, fence
        self._readers = Readers(folder)
        self._thread = ThreadPoolExecutor(1, "retention", initializer=yield_to_training)
        self._newest: Future[None] | None = None
        self._failing: set[int] = set()

    def request(self) -> None:
        """Ask for a pass; one that has not begun yet serves this request, too."""
        if self._newest is not None and self._newest.done():
            self._newest.result()
        elif self._newest is not None and not self._newest.running():
            return
        self._newest = self._thread.submit(self._pass)

    def settle(self) -> None:
        """Wait for the passes asked for: what is there afterwards stays until the next request."""
        if self._newest is not None:
            wait([self._newest])

    def close(self, timeout: float | None = None) -> None:
        """Wait for the passes asked for, `timeout` seconds at most; the next attempt goes on."""
        if self._newest is not None:
            wait([self._newest], timeout)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _pass(self) -> None:
        try:
            failures = prune(self._folder, self.keep, self._readers, self._fence.check)
        except SupersededError:
            return  # a newer attempt prunes; the next commit of this one will say so
        except OSError as error:
            logger().warning("cannot look for old checkpoints", error=str(error))
            return
        for step in sorted(failures.keys() - self._failing):
            logger().warning(
                "cannot delete an old checkpoint, will try again",
                step=step,
                error=str(failures[step]),
            )
        for step in sorted(self._failing - failures.keys()):
            logger().info("deleted an old checkpoint at a later try", step=step)
        self._failing = set(failures)


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
