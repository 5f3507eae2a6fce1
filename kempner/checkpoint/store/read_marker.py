"""Markers that say which checkpoint is being read, so that retention does not delete it.

A reader puts a marker, `.reading-step-<s>.<nonce>`, beside the checkpoint (a commit is never
written to) *before* it opens the manifest, and changes its content every few seconds. Whoever wants
to delete looks for markers before and after it withdraws the manifest, so that one of the two
notices the other. A marker that has not changed for a while, on the clock of the one who looks,
belongs to a reader that is gone: no two machines' clocks are compared, and nothing is blocked for
ever.

A network file system may show a new marker late; a reader whose checkpoint vanishes all the same
finds a file missing, and says so.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from kempner.checkpoint.format.names import CheckpointFolder, marker_name, parse_step
from kempner.run.output.logs import logger
from kempner.run.process.retry import describe

RENEW_EVERY = 5.0
"""Seconds between changes of a marker."""

STALE_AFTER = 60.0
"""Seconds without a change after which a marker's reader is taken to be gone."""


def _warn(error: OSError) -> None:
    logger().warning(
        "cannot mark the checkpoint as being read; retention may delete it meanwhile",
        error=describe(error),
    )


@contextmanager
def reading(
    folder: CheckpointFolder, step: int, unmarked: Callable[[OSError], None] = _warn
) -> Iterator[None]:
    """While the context is open, retention leaves the checkpoint of `step` alone.

    Where the folder cannot be written to, `unmarked` is told why, by default a log; the reader goes
    on without.
    """
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
    """`reading`, of a checkpoint's path; one that is set aside is never deleted anyway."""
    step = parse_step(checkpoint.name)
    if step is None:
        return nullcontext()
    return reading(CheckpointFolder(checkpoint.parent), step, unmarked)


class Readers:
    """Tells whether somebody reads a checkpoint; remembers markers from look to look."""

    def __init__(self, folder: CheckpointFolder, clock: Callable[[], float] = time.monotonic):
        self._folder, self._clock = folder, clock
        self._changed: dict[str, tuple[bytes, float]] = {}

    def are_reading(self, step: int) -> bool:
        """Whether a marker names `step` and its reader may be alive.

        A marker is believed at the first look; one that has become stale is removed.
        """
        return any(self._is_alive(marker) for marker in self._folder.markers(step))

    def _is_alive(self, marker: Path) -> bool:
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


def _remove(marker: Path) -> None:
    try:
        marker.unlink(missing_ok=True)
    except OSError as error:
        logger().warning("cannot remove a reader's marker", error=describe(error))
