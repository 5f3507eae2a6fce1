"""Commits a written folder as a checkpoint. The order of operations is essential:

    all ranks' files seen -> manifest written and fsynced -> folder fsynced
    -> replacement of `latest` prepared -> fence
    -> step-<s> by rename -> parent fsynced -> fence -> `latest` swapped by rename -> parent fsynced

A crash after any of these leaves either the previous commit or the new one as the newest, never a
torn one; and a superseded attempt changes nothing. The rename of the folder is the point of no
return: a later failure is reported and retried after each later commit, but undoes nothing. From
the prepared replacement of `latest`, a later process knows which commits followed the one that
`latest` still names. The replacements of an attempt are deleted when another begins, so that a late
rename makes no old checkpoint the newest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kempner.checkpoint.format.manifest import Manifest, encode
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from kempner.checkpoint.store.selection import head, left_behind
from kempner.run.output.units import size_text
from kempner.run.process.durable_io import (
    LATE,
    await_entry,
    fsync_directory,
    holds,
    rename,
    write_durable,
)
from kempner.run.process.retry import describe
from kempner.run.record.attempts import Attempt


class Guard(Protocol):
    """Checked before each irreversible operation of a commit: an attempt's `Fence`."""

    @property
    def attempt(self) -> Attempt: ...

    def check(self) -> None:
        """Raise a `RunError` if the attempt must no longer commit."""
        ...


def commit(
    folder: CheckpointFolder,
    written: Path,
    manifest: Manifest,
    fence: Guard,
    report: Callable[[str], None],
) -> Path:
    """Make `written`, whose data files are durable, the newest checkpoint; its path.

    Earlier steps that are not on the live branch were committed late by a superseded attempt. They
    are set aside first, and `report` gets a sentence for each: else they would count as part of the
    live branch once it has passed them. Raises `SupersededError` if a newer attempt owns the run,
    and `OSError`, also if another host's file does not become visible here; then there is no
    checkpoint."""
    step = manifest.train_state.step
    await_files(written, manifest.files)
    place, content = folder.step(manifest.train_state.step), encode(manifest)
    write_durable(written / MANIFEST, content)
    fsync_directory(written)
    folder.prepare_latest(step, _unique(fence))
    fence.check()
    for left in left_behind(folder.committed(), head(folder), step):
        _abandon(folder, left, fence, report)
    if place.is_dir() and any(place.iterdir()):
        aside = folder.set_aside(step, "damaged", fence.attempt.number)
        report(f"there was a {place.name} without a {MANIFEST}; it is now {aside.name}")
    rename(written, place, arrived=lambda: holds(place / MANIFEST, content))
    folder.tip.reach(step)
    _settle(folder, fence, report)
    return place


def go_on_from(
    folder: CheckpointFolder, step: int, fence: Guard, report: Callable[[str], None]
) -> None:
    """Make `step` the end of the live branch. Later checkpoints are set aside, and `report` gets a
    sentence for each. Raises as `commit`."""
    beyond = [s for s in folder.committed() if s > step]
    if not beyond and not folder.prepared() and folder.latest() == step:
        folder.tip.step = step
        return
    fence.check()
    for left in beyond:
        _abandon(folder, left, fence, report)
    folder.tip.reach(step)
    _settle(folder, fence, report)


def catch_up(folder: CheckpointFolder, fence: Guard) -> None:
    """Make the newest commit durable and point `latest` to it, if that has failed before. Raises as
    `commit`."""
    tip = folder.tip
    with tip.lock:
        if not tip.durable:
            fsync_directory(folder.path)
            tip.durable = True
        if not tip.pointed and tip.step is not None:
            fence.check()
            folder.point_latest(tip.step, _unique(fence))
            tip.pointed = True


def _unique(fence: Guard) -> str:
    return f"a{fence.attempt.number}-{fence.attempt.nonce}"


def _settle(folder: CheckpointFolder, fence: Guard, report: Callable[[str], None]) -> None:
    try:
        catch_up(folder, fence)
    except OSError as error:
        report(
            f"`latest` cannot name step {folder.tip.step} yet ({describe(error)}); the checkpoint "
            "counts all the same, and this is tried again after the next one"
        )


def _abandon(
    folder: CheckpointFolder, step: int, fence: Guard, report: Callable[[str], None]
) -> None:
    aside = folder.set_aside(step, "abandoned", fence.attempt.number)
    report(f"step {step} was committed before; the earlier checkpoint is now {aside.name}")


def await_files(written: Path, names: Iterable[str], seconds: float = LATE) -> None:
    """Wait until the files of all ranks are visible in a folder, at most `seconds`. Raises
    `FileNotFoundError`, as for a node on which the file system is not mounted, so that its files
    are elsewhere."""
    end = time.monotonic() + seconds
    for name in names:
        if not await_entry(written / name, end - time.monotonic()):
            raise FileNotFoundError(
                f"its rank has written {name}, but rank 0 does not see it in {written}: is that on "
                "a file system that all nodes share?"
            )


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds between the second failure and the next try, doubled for each further one, and the most
(more only for saves that take longer to fail). The first failure is retried at once; after the
second the cause probably lasts, as a full disk does."""


@dataclass(frozen=True)
class SaveFailures:
    """The saves that failed since the last commit; times in seconds of one clock. `since` is the
    time of the first failure, `last` that of the newest, `took` the duration of that save. `reason`
    is its cause; `passing`: only storage was at fault, which may work again."""

    count: int = 0
    since: float = 0.0
    last: float = 0.0
    took: float = 0.0
    reason: str = ""
    passing: bool = True

    def with_another(self, now: float, took: float, reason: str, passing: bool) -> SaveFailures:
        since = self.since if self.count else now
        return SaveFailures(self.count + 1, since, now, took, reason, passing)

    def lasting(self, now: float) -> float:
        """Seconds since the first failure; infinite if it will not pass."""
        if not self.count:
            return 0.0
        return now - self.since if self.passing else math.inf

    @property
    def pause(self) -> float:
        """Seconds between the last failure and the next try."""
        if self.count <= 1:
            return 0.0
        pause = min(FIRST_PAUSE * 2.0 ** min(self.count - 2, 10), LONGEST_PAUSE)
        return max(pause, self.took)

    def due(self, now: float) -> bool:
        return self.count > 0 and now - self.last >= self.pause


@dataclass(frozen=True)
class DiskRoom:
    """Whether checkpoints fit on the disk. `sentence` says what is short and what to do, or is
    empty; `refused`: not even one fits."""

    sentence: str = ""
    refused: bool = False


def judge_room(free: int, size: int, there: int, keep: int) -> DiskRoom:
    """Whether `free` bytes suffice for checkpoints of about `size` bytes. `keep` of them are kept,
    `there` exist already, and the next one is written before the oldest is deleted."""
    one, left = size_text(size), size_text(free)
    if free < size:
        return DiskRoom(
            f"a checkpoint needs about {one}, and {left} are free: free disk space, or set "
            "checkpoint.dir to a larger disk",
            refused=True,
        )
    more = max(1, keep + 1 - there)
    if free < more * size:
        return DiskRoom(
            f"{left} are free, and {more} more checkpoints of about {one} are to come: free disk "
            "space, or lower checkpoint.keep_last"
        )
    return DiskRoom()
