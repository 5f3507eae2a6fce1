"""Retention: which checkpoints to delete, and how.

A deletion has three steps: the manifest is renamed to `manifest.withdrawn.json` (from then on there
is no checkpoint), the folder is renamed to a name of dying ones, and its content is deleted. After
a crash or an error, a later pass continues.

Checkpoints that were set aside are limited, too: `keep_damaged` damaged ones stay, and abandoned
ones while there is room. Before a save begins there are at most `keep_last` + 1 copies of steps, so
there is never more than one more.

A reader creates a marker, `.reading-step-<s>.<nonce>`, beside the checkpoint (a commit is never
written to) *before* it opens the manifest, and changes its content every few seconds. A deleting
process looks for markers before and after it withdraws the manifest, so that one of the two notices
the other. If a marker has not changed for a while, by the clock of the deleting process, its reader
is gone. So no clocks of two machines are compared, and no deletion is blocked for ever.

A network file system may show a new marker late; a reader whose checkpoint is deleted nevertheless
finds a file missing, and reports that.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from kempner.checkpoint.format.manifest import Manifest, digest, read
from kempner.checkpoint.format.names import (
    LATEST,
    MANIFEST,
    WITHDRAWN,
    CheckpointFolder,
    dying_name,
    leftover_step,
    marker_name,
    parse_aside,
    parse_step,
)
from kempner.checkpoint.io.file_writer import yield_to_training
from kempner.checkpoint.io.verify import Verification, read_findings
from kempner.checkpoint.store.commit import catch_up
from kempner.checkpoint.store.selection import head, newest
from kempner.config.sections import CheckpointSection
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import fsync_directory
from kempner.run.process.exit_codes import DataError, UsageError
from kempner.run.process.retry import describe
from kempner.run.record.attempts import Fence, SupersededError
from kempner.run.record.recorded_config import checkpoint_folder
from kempner.run.record.run_dir import RunDirectory

RENEW_EVERY = 5.0  # seconds between changes of a marker
STALE_AFTER = 60.0  # seconds without a change after which a marker's reader counts as gone


def _warn(error: OSError) -> None:
    logger().warning(
        "cannot mark the checkpoint as being read; retention may delete it meanwhile",
        error=describe(error),
    )


@contextmanager
def reading(
    folder: CheckpointFolder, step: int, unmarked: Callable[[OSError], None] = _warn
) -> Iterator[None]:
    """Keep retention from deleting the checkpoint of `step` in this context. If the folder cannot
    be written to, `unmarked` gets the error (by default it is logged), and the reader goes on
    without a marker."""
    marker = folder.path / marker_name(step, secrets.token_hex(8))
    try:
        _renew(marker, 0)
    except OSError as error:
        unmarked(error)
        yield
        return
    done = threading.Event()
    renewal = threading.Thread(
        target=_keep_renewing, args=(marker, done), name="reading", daemon=True
    )
    renewal.start()
    try:
        yield
    finally:
        done.set()
        renewal.join()
        _remove(marker)


def reading_at(
    checkpoint: Path, unmarked: Callable[[OSError], None] = _warn
) -> AbstractContextManager[None]:
    """As `reading`, for a checkpoint's path, which may be one set aside."""
    aside, step = parse_aside(checkpoint.name), parse_step(checkpoint.name)
    step = aside.step if aside is not None else step
    if step is None:
        return nullcontext()
    return reading(CheckpointFolder(checkpoint.parent), step, unmarked)


class Readers:
    """Finds out whether checkpoints are being read; remembers markers between calls."""

    def __init__(self, folder: CheckpointFolder, clock: Callable[[], float] = time.monotonic):
        self._folder, self._clock = folder, clock
        self._changed: dict[str, tuple[bytes, float]] = {}

    def are_reading(self, step: int) -> bool:
        """Whether there is a marker of `step` whose reader may be alive. A marker counts at the
        first look; a stale one is removed."""
        return any(self._is_alive(marker) for marker in self._folder.markers(step))

    def _is_alive(self, marker: Path) -> bool:
        if marker.name in _left:
            with suppress(OSError):  # retried at the next look
                marker.unlink(missing_ok=True)
            return False
        try:
            content = marker.read_bytes()
        except FileNotFoundError:
            return False
        now = self._clock()
        known, since = self._changed.get(marker.name, (None, now))
        if content != known:
            self._changed[marker.name] = content, now
            return True
        if now - since < STALE_AFTER:
            return True
        del self._changed[marker.name]
        marker.unlink(missing_ok=True)
        return False


def _renew(marker: Path, beat: int) -> None:
    marker.write_text(f"{platform.node()} {os.getpid()} {beat}\n")


def _keep_renewing(marker: Path, done: threading.Event) -> None:
    beat = 0
    while not done.wait(RENEW_EVERY):
        beat += 1
        try:
            _renew(marker, beat)
        except OSError as error:
            logger().warning("cannot renew a reader's marker", error=describe(error))
            return


_left: set[str] = set()
"""Names of this process's markers that it could not remove; their reads have ended."""


def _remove(marker: Path) -> None:
    try:
        marker.unlink(missing_ok=True)
    except OSError as error:
        _left.add(marker.name)
        logger().warning("cannot remove a reader's marker", error=describe(error))


@dataclass(frozen=True)
class Keep:
    """The number of newest checkpoints to keep (`last`), the multiples of `every` to keep for good,
    the steps to keep while they are `pinned`, and the number of `damaged` ones to keep."""

    last: int
    every: int | None = None
    pinned: frozenset[int] = frozenset()
    damaged: int = 3

    @classmethod
    def of(cls, section: CheckpointSection) -> Self:
        given = section.keep_damaged
        damaged = cls.damaged if given is None else given
        return cls(section.keep_last, section.keep_every, damaged=damaged)

    def for_good(self, step: int) -> bool:
        return step in self.pinned or (self.every is not None and step % self.every == 0)


def named_as_base(folder: CheckpointFolder) -> frozenset[int]:
    """The steps whose weights other checkpoints of the folder need. Raises as `read`."""
    bases = set()
    for step in folder.committed():
        with suppress(DataError):
            if (base := read(folder.step(step)).identity.base) is not None:
                bases.add(base.step)
    return frozenset(bases)


def expendable(committed: Sequence[int], latest: int | None, keep: Keep) -> list[int]:
    """The steps to delete: those before `latest` that `keep` does not cover. Steps beyond `latest`
    were committed late by a superseded attempt: they do not count as kept, and are not deleted,
    since the run sets them aside when it gets there."""
    if latest is None:
        return []
    branch = [step for step in sorted(committed) if step <= latest]
    return [step for step in branch[: max(0, len(branch) - keep.last)] if not keep.for_good(step)]


@dataclass
class _Deletions:
    """The deletions of one pass; `failures` has the errors by step."""

    folder: CheckpointFolder
    readers: Readers
    check: Callable[[], None]
    failures: dict[int, OSError] = field(default_factory=dict)

    def attempt(self, step: int, act: Callable[[], None], latest_too: bool = True) -> None:
        self.check()
        try:
            stays = not latest_too and step == self.folder.latest()
            if not stays and not self.readers.are_reading(step):
                act()
        except OSError as error:
            self.failures[step] = error

    def finish(self) -> dict[int, OSError]:
        """Delete the folders that were renamed for deletion."""
        for dying in self.folder.leftovers(before_attempt=1):
            if (step := leftover_step(dying)) not in self.failures:
                self.attempt(step, partial(shutil.rmtree, dying))
        return self.failures


def prune(
    folder: CheckpointFolder, keep: Keep, readers: Readers, check: Callable[[], None]
) -> dict[int, OSError]:
    """One pass: delete the `expendable` steps, and finish earlier deletions. A checkpoint that is
    being read is left for a later pass. `check` is called before each deletion and may raise to end
    the pass. Returns the errors by step."""
    deletions = _Deletions(folder, readers, check)
    for step in expendable(folder.committed(), head(folder), keep):
        deletions.attempt(step, partial(_withdraw, folder, step), latest_too=False)
    # Look again: a reader that came before the withdrawal has the manifest and goes on reading,
    # one that comes now finds none.
    for step in folder.withdrawn():
        rename = partial(_rename_for_deletion, folder, folder.step(step), step)
        deletions.attempt(step, rename, latest_too=False)
    return deletions.finish()


def bound(
    folder: CheckpointFolder, keep: Keep, readers: Readers, check: Callable[[], None]
) -> dict[int, OSError]:
    """Delete checkpoints set aside beyond their limits; as `prune`."""
    deletions = _Deletions(folder, readers, check)
    aside = {path: parsed for path in folder.copies() if (parsed := parse_aside(path.name))}
    by_age = sorted(aside, key=lambda path: (aside[path].attempt, aside[path].step, path.name))
    damaged = [path for path in by_age if aside[path].why == "damaged"]
    abandoned = [path for path in by_age if aside[path].why == "abandoned"]
    writing = {path for path in folder.copies() if path.name.startswith(".")}
    others = {*counted(folder, keep, readers)} - {*abandoned} - writing
    stay = max(0, keep.last + 1 - len(others))
    excess = damaged[: max(0, len(damaged) - keep.damaged)]
    excess += abandoned[: max(0, len(abandoned) - stay)]
    for path in excess:
        step = aside[path].step
        deletions.attempt(step, partial(_rename_for_deletion, folder, path, step))
    return deletions.finish()


def counted(folder: CheckpointFolder, keep: Keep, readers: Readers) -> list[Path]:
    """The copies of steps that count against the limit: all but those kept for good, damaged, or
    being read."""
    old = folder.committed()[: -keep.last or None]

    def counts(path: Path) -> bool:
        step, aside = parse_step(path.name), parse_aside(path.name)
        if aside is not None:
            return aside.why != "damaged" and not readers.are_reading(aside.step)
        if step is None or step not in old:
            return True
        return not (keep.for_good(step) or readers.are_reading(step))

    return [path for path in folder.copies() if counts(path)]


def _withdraw(folder: CheckpointFolder, step: int) -> None:
    path = folder.step(step)
    (path / MANIFEST).rename(path / WITHDRAWN)
    fsync_directory(path)


def _rename_for_deletion(folder: CheckpointFolder, path: Path, step: int) -> None:
    path.rename(folder.path / dying_name(step, secrets.token_hex(4)))


class Pruner:
    """Prunes in a thread with the lowest priority, so that no commit waits for it. Used by one
    thread of rank 0. A failed deletion is logged once per step, and retried at every later pass."""

    def __init__(self, folder: CheckpointFolder, keep: Keep, fence: Fence) -> None:
        self._folder, self.keep, self._fence = folder, keep, fence
        self._readers = Readers(folder)
        self._thread = ThreadPoolExecutor(1, "retention", initializer=yield_to_training)
        self._newest: Future[None] | None = None
        self._failing: set[int] = set()

    def request(self) -> None:
        """Request a pass; one that has not begun yet serves this request, too."""
        if self._newest is not None and self._newest.done():
            self._newest.result()
        elif self._newest is not None and not self._newest.running():
            return
        self._newest = self._thread.submit(self._pass)

    def make_room(self) -> None:
        """Before a save: reduce the copies of steps to at most `keep.last` + 1. Call while nothing
        is being written. Raises `OSError` if there are more that cannot be deleted, and as
        `Fence.check`."""
        attempt = self._fence.attempt.number
        dying = self._folder.leftovers(before_attempt=1)  # deleted by the passes
        for left in self._folder.leftovers(before_attempt=attempt + 1):
            if left not in dying:
                discard(left)
        most = self.keep.last + 1
        if len(counted(self._folder, self.keep, self._readers)) <= most:
            return
        self._fence.check()
        self._set_torn_aside()
        self._thread.submit(self._pass).result()
        there = counted(self._folder, self.keep, self._readers)
        if len(there) > most:
            raise OSError(
                errno.EBUSY,
                f"{len(there)} copies of steps are there, and those beyond {most} cannot be "
                "deleted: nothing more is written until they can",
                str(self._folder.path),
            )

    def _set_torn_aside(self) -> None:
        """Set aside folders of steps that have lost their manifest, as to a purge."""
        known = {*self._folder.committed(), *self._folder.withdrawn()}
        for path in self._folder.copies():
            if (step := parse_step(path.name)) is not None and step not in known:
                aside = self._folder.set_aside(step, "damaged", self._fence.attempt.number)
                logger().warning(f"{path.name} has no {MANIFEST}; it is now {aside.name}")

    def settle(self) -> None:
        """Wait for the requested passes; afterwards nothing is deleted until the next request."""
        if self._newest is not None:
            wait([self._newest])

    def close(self, timeout: float | None = None) -> None:
        """Wait for the requested passes, at most `timeout` seconds; the next attempt continues
        them."""
        if self._newest is not None:
            wait([self._newest], timeout)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _pass(self) -> None:
        args = self._folder, self.keep, self._readers, self._fence.check
        try:
            if not self._catch_up():
                return  # the newest commit may not survive a power loss yet
            failures = prune(*args) | bound(*args)
        except SupersededError:
            return  # the newer attempt prunes; the next commit of this one will raise
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

    def _catch_up(self) -> bool:
        """Retry `catch_up`; whether the newest commit is durable (`latest` may still be old)."""
        try:
            catch_up(self._folder, self._fence)
        except OSError as error:
            logger().warning("`latest` cannot be set yet", error=describe(error))
        return self._folder.tip.durable


def sweep(folder: CheckpointFolder, attempt: int) -> list[tuple[Path, OSError]]:
    """Delete unfinished saves of attempts before `attempt`; the paths that could not be deleted."""
    failures, committed = [], folder.committed()
    unused = [path for path, step in folder.prepared().items() if step not in committed]
    for leftover in [*folder.leftovers(before_attempt=attempt), *unused]:
        try:
            leftover.unlink() if leftover in unused else shutil.rmtree(leftover)
        except OSError as error:
            failures.append((leftover, error))
    return failures


def discard(written: Path) -> None:
    """Delete a failed save to free its space. What cannot be deleted now, the next attempt's
    `sweep` deletes."""
    shutil.rmtree(written, ignore_errors=True)


@dataclass(frozen=True)
class Item:
    """One checkpoint: committed, set aside, or without a manifest. `problem` is what its manifest
    and file lengths show to be wrong; `finding` the result of the last full verification; `note` is
    its role, such as `latest` or set aside."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None
    finding: Verification | None
    note: str


def locate(directory: Path) -> tuple[CheckpointFolder, Path | None]:
    """The checkpoint folder for a run's directory, a checkpoint folder, or a single checkpoint,
    which then is the second value. Raises `UsageError` if there are no checkpoints."""
    inside = checkpoint_folder(RunDirectory(directory))
    folder = CheckpointFolder(inside if inside.is_dir() else directory)
    if any(_ours(folder)):
        return folder, None
    single = directory.resolve()  # `latest` is such a name, too
    if directory.name == LATEST and single.is_file():
        step = CheckpointFolder(directory.parent).latest()
        single = single if step is None else CheckpointFolder(single.parent).step(step)
    if (single / MANIFEST).is_file():
        return CheckpointFolder(single.parent), single
    if RunDirectory(directory).ledger.exists():
        raise UsageError(
            f"{directory} has no checkpoint in {inside} yet; the run writes one every "
            "checkpoint.interval steps, and when it is stopped"
        )
    found = "contains no checkpoint" if os.path.lexists(directory) else "does not exist"
    raise UsageError(
        f"{directory} {found}; name a run's directory, the folder that contains its step-... "
        "folders, or one of those"
    )


def checkpoints_of(directory: Path) -> Path:
    """The checkpoint folder of a run, given its directory or that folder, which need not exist. A
    folder counts as the checkpoint folder if it has that name or has checkpoints."""
    inside = RunDirectory(directory).checkpoints
    itself = directory.name == inside.name or any(_ours(CheckpointFolder(directory)))
    return directory if itself else inside


def pick(folder: CheckpointFolder, only: Path | None, step: int | None) -> Path:
    """The checkpoint `only`, or that of `step`, or the newest. Raises `UsageError` if there is
    none."""
    if only is not None:
        if step is not None and parse_step(only.name) != step:
            raise UsageError(f"{only} is not the checkpoint of step {step}; remove --step")
        return only
    wanted = newest(folder) if step is None else step
    if wanted is None:
        raise UsageError(f"{folder.path} has no `latest`; name a checkpoint with --step")
    return at_step(folder, wanted)


def at_step(folder: CheckpointFolder, step: int) -> Path:
    """The committed checkpoint of a step. Raises `UsageError`, which lists those there are."""
    committed = folder.committed()
    if step not in committed:
        there = ", ".join(map(str, committed)) or "none"
        raise UsageError(f"step {step} is not committed in {folder.path}; these are: {there}")
    return folder.step(step)


def survey(folder: CheckpointFolder) -> list[Item]:
    """All checkpoints in a folder, sorted by step; costs a stat(2) per file."""
    findings, latest = read_findings(folder.path), folder.latest()
    items = [_examine(path, step, latest, findings) for path, step in _ours(folder)]
    return sorted(items, key=lambda item: (item.step, item.path.name))


def _ours(folder: CheckpointFolder) -> Iterator[tuple[Path, int]]:
    for path in folder.entries():
        aside, step = parse_aside(path.name), parse_step(path.name)
        if aside is not None or step is not None:
            yield path, aside.step if aside else step or 0


def _examine(path: Path, step: int, latest: int | None, findings: dict[str, Verification]) -> Item:
    note = _note(path.name, step, latest)
    if not (path / MANIFEST).exists():
        return Item(path, step, None, "no manifest: never committed, or partly deleted", None, note)
    try:
        manifest = read(path)
    except DataError:
        return Item(path, step, None, f"{MANIFEST} is damaged", None, note)
    problem = next(_wrong_lengths(path, manifest), None)
    return Item(path, step, manifest, problem, findings.get(digest(manifest)), note)


def _note(name: str, step: int, latest: int | None) -> str:
    if aside := parse_aside(name):
        what = "made again" if aside.why == "abandoned" else "found damaged"
        return f"{aside.why}: {what} by attempt {aside.attempt}"
    if latest is None or step < latest:
        return ""
    return "latest" if step == latest else "beyond latest: from an abandoned branch"


def _wrong_lengths(path: Path, manifest: Manifest) -> Iterator[str]:
    for name, entry in manifest.files.items():
        try:
            length = (path / name).stat().st_size
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            continue
        if length != entry.bytes:
            yield f"{name} has {length} bytes instead of {entry.bytes}"
