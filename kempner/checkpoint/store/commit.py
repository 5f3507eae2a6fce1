"""Commits a written folder as a checkpoint. The order of its operations is the promise:

    all ranks' files seen -> manifest written and fsynced -> folder fsynced
    -> next `latest` beside the present one -> fence
    -> step-<s> by rename -> parent fsynced -> fence -> `latest` swapped by rename -> parent fsynced

A crash after any of these leaves either the previous commit or the new one as the newest, never a
torn one; and an attempt that was superseded changes nothing. The rename of the folder is the point
of no return: what fails after it is told, tried again after each later commit, and undoes nothing.
By then the next `latest` is there to tell, so that a later process knows as well which commits
followed the one that `latest` still names. What an attempt prepared goes once another one has
begun: a rename of it that arrives later still makes no checkpoint the newest.
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
    """What a commit asks before each step that cannot be taken back: an attempt's `Fence`."""

    @property
    def attempt(self) -> Attempt: ...

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

    Checkpoints up to that step that are beyond the live branch came late, from an attempt that was
    superseded: they are set aside first, and `report` gets a sentence for each. Otherwise they
    would be taken for the live branch's once that has passed them. Raises `SupersededError` if a
    newer attempt owns the run, and `OSError`, also if a file that another host has written does not
    come to be seen here; then there is no checkpoint.
    """
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
    """From now on the live branch ends with the checkpoint of `step`. Those beyond it are set
    aside, and `report` gets a sentence for each. Raises as `commit`."""
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
    """Make the newest commit durable, and `latest` name it, where that has not worked yet. Raises
    as `commit`."""
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
    """Wait until the files of all ranks are seen in a folder, for `seconds` in all. A node where
    the path leads to another folder (because a file system is not mounted there, say) has written
    its files where rank 0 does not see them. Raises `FileNotFoundError`."""
    end = time.monotonic() + seconds
    for name in names:
        if not await_entry(written / name, end - time.monotonic()):
            raise FileNotFoundError(
                f"its rank has written {name}, but rank 0 does not see it in {written}: is that on "
                "a file system that all nodes share?"
            )


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds from the second failure to the next try, and the most, but for saves that take longer to
fail: each pause is twice as long as the last. After the first failure nothing is waited for; after
the second it will take a while: a full disk is as full after the next step."""


@dataclass(frozen=True)
class SaveFailures:
    """Saves that failed since the last commit. Times are in seconds of one clock. `since` is when
    the first one had failed, `last` when the newest had, and `took` how long that was under way.
    `reason` says why, and `passing` whether time may heal it: storage that refused."""

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
        """For how many seconds no save has worked; infinite where time does not heal it."""
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
    """Whether checkpoints fit. `sentence` says what is short, and what to do; empty if nothing is.
    `refused` says that not even one fits."""

    sentence: str = ""
    refused: bool = False


def judge_room(free: int, size: int, there: int, keep: int) -> DiskRoom:
    """Whether `free` bytes are enough for checkpoints of about `size` bytes each. `keep` of them
    stay, `there` are there already, and the next one is written before the oldest is deleted."""
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
