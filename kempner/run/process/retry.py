"""Retries of storage that fails for a moment: which errors, for how long, and what is logged.

This is the one place that tells a temporary failure from a permanent one. An error number means
that something cannot be read or written *now*; only data that was read and is wrong is damaged. So
all reads and writes go through `storage_waits().retry`, which repeats them until they succeed, a
stop is requested, or `resilience.patience` is over. An operation that never returns is left to the
hang detection.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode, RunError
from kempner.run.process.threads import AwakeClock

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds until the second attempt, and the most between two: each pause is twice the last."""

EMPTY_SHARE = 0.2
"""Share of the patience for a file that is empty and should not be: it may be a mount that is not
back yet, or damage, and an older checkpoint may exist."""

TELL_EVERY = 10.0
"""Least seconds between two logged waits. Sooner ones are logged with the next, so that storage
that fails now and then does not fill the log."""

_POLL = 0.1  # seconds between two looks whether a stop was requested

_ALWAYS = (
    # The device, or the server behind it.
    *("EIO", "EREMOTEIO", "ESTALE", "ETIMEDOUT", "ENODEV", "ENXIO", "ESHUTDOWN", "ENOLINK"),
    "ECOMM",
    # The way to it.
    *("ENOTCONN", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE", "EPROTO"),
    *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
    # Room, for files or in this host.
    *("ENOSPC", "EDQUOT", "EMFILE", "ENFILE", "ENOMEM", "ENOBUFS"),
    # Another process is faster, or holds it.
    *("EAGAIN", "EBUSY", "EINTR", "ENOLCK", "EDEADLK"),
)
_WHERE_IT_WORKED = (
    # A mount, a server or a right that is not there at the moment.
    *("ENOENT", "ENOTDIR", "EACCES", "EPERM", "EROFS", "ELOOP", "ENODATA", "EINVAL", "EFBIG"),
    # A ticket that has run out.
    *("EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED", "ENOKEY"),
)

PASSING = frozenset(getattr(errno, name) for name in _ALWAYS)
"""Error numbers that say nothing about the file: always retried."""

PASSING_WHERE_IT_WORKED = frozenset(getattr(errno, name) for name in _WHERE_IT_WORKED)
"""Error numbers that mean a wrong path or missing rights, unless the same operation has worked
before in this run: then they are retried, too."""

T = TypeVar("T")


class StorageUnavailableError(RunError):
    """Storage has failed for longer than `resilience.patience`; another start may find it
    working."""

    code = ExitCode.STORAGE_UNAVAILABLE


class WaitStoppedError(RunError):
    code = ExitCode.STOPPED


def is_passing(error: OSError, worked: bool) -> bool:
    """Whether an error may be temporary; `worked`: the same operation has worked in this run."""
    return error.errno in PASSING or (worked and error.errno in PASSING_WHERE_IT_WORKED)


def empty(path: Path, length: int | None = None) -> OSError:
    """The error for an empty file that should have content, of `length` bytes if known."""
    words = "it is empty" if length is None else f"has 0 bytes instead of {length}"
    return OSError(errno.ENODATA, words, str(path))


def read_filled(path: Path) -> bytes:
    """The content of a file that must not be empty. Raises `OSError`, also if it is empty."""
    if content := path.read_bytes():
        return content
    raise empty(path)


def describe(error: OSError) -> str:
    words = error.strerror or str(error)
    return f"{error.filename}: {words}" if error.filename else words


@dataclass(frozen=True)
class RetryDecision:
    """Whether to try again, and after how many seconds (`pause`). If not, the failure is
    `permanent`, or the patience is over."""

    again: bool
    pause: float = 0.0
    permanent: bool = False


def decide_retry(
    error: OSError, worked: bool, waited: float, tries: int, patience: float
) -> RetryDecision:
    """What to do after `tries` failures in a row within `waited` seconds; retries end after
    `patience` seconds."""
    if not is_passing(error, worked):
        return RetryDecision(again=False, permanent=True)
    if error.errno == errno.ENODATA:
        patience *= EMPTY_SHARE
    if waited >= patience:
        # A file that stays empty is damaged.
        return RetryDecision(again=False, permanent=error.errno == errno.ENODATA)
    pause = min(FIRST_PAUSE * 2.0 ** min(tries - 1, 20), LONGEST_PAUSE)
    return RetryDecision(again=True, pause=min(pause, patience - waited))


@dataclass(frozen=True)
class StorageWait:
    """Completed waits for storage: for what (the last one), seconds in all, and attempts in all."""

    what: str
    seconds: float
    tries: int


class StorageWaits:
    """Repeats work on storage, and knows what this process waits for. Methods may be called from
    any thread. Before `configure` nothing is retried: a command reports errors at once."""

    def __init__(self) -> None:
        self.patience = 0.0
        """Seconds for which a failing operation is retried."""
        self.tries = 0
        """Retries so far, of everything: a sign that this process is alive."""
        self._stop: Callable[[], bool] = lambda: False
        self._tell: Callable[[StorageWait], None] = lambda waited: None
        self._lock = threading.Lock()
        self._waiting: dict[int, str] = {}
        self._announced = False
        self._unlogged, self._logged_at = StorageWait("", 0.0, 0), -TELL_EVERY

    def configure(self, patience: float, stop: Callable[[], bool] = lambda: False) -> None:
        """From now on retry for `patience` seconds, but no longer once `stop` returns True."""
        self.patience, self._stop = patience, stop

    def tell_to(self, tell: Callable[[StorageWait], None]) -> None:
        """Call `tell`, from the thread that has waited, when storage works again."""
        self._tell = tell

    @property
    def waiting_for(self) -> str:
        """What this process waits for now; empty if nothing."""
        return next(iter(tuple(self._waiting.values())), "")

    def retry(
        self,
        work: Callable[[], T],
        worked: bool | Callable[[], bool] = False,
        stop: Callable[[], bool] = lambda: False,
        path: Path | None = None,
    ) -> T:
        """Call `work` until it succeeds, and return its result; each call must open its files anew.
        `worked`: the same has worked before in this run; a function is called after a failure.
        `path` is the file at fault if the error does not name it. Raises the `OSError` of a
        permanent failure, `StorageUnavailableError` when the patience is over, and
        `WaitStoppedError` if this `stop`, or that of `configure`, returns True meanwhile."""
        try:
            return work()
        except OSError as error:
            failure = _named(error, path)
        clock, tries, known = AwakeClock(), 1, worked() if callable(worked) else worked
        try:
            while True:
                decision = decide_retry(failure, known, waited := clock.now(), tries, self.patience)
                if decision.permanent:
                    raise failure
                if not decision.again:
                    after = f", and has not worked for {waited:.0f} s" if waited >= 1 else ""
                    sentence = f"storage is not available{after}: {describe(failure)}"
                    raise StorageUnavailableError(sentence) from failure
                self._announce(failure)
                self._pause(decision.pause, clock, stop)
                tries, self.tries = tries + 1, self.tries + 1
                try:
                    result = work()
                    break
                except OSError as error:
                    failure = _named(error, path)
            self._note_end(StorageWait(describe(failure), clock.now(), tries))
            return result
        finally:
            with self._lock:
                self._waiting.pop(threading.get_ident(), None)
                self._announced = self._announced and bool(self._waiting)

    def _announce(self, failure: OSError) -> None:
        """Log that this process waits: once, and not just after another wait was logged."""
        with self._lock:
            self._waiting[threading.get_ident()] = describe(failure)
            silent = time.monotonic() - self._logged_at < TELL_EVERY
            say = not (silent or self._announced)
            self._announced = self._announced or say
        if say:
            logger().warning(
                f"waiting for storage: {describe(failure)}", patience=round(self.patience, 1)
            )

    def _pause(self, seconds: float, clock: AwakeClock, stop: Callable[[], bool]) -> None:
        end = clock.now() + seconds
        while (left := end - clock.now()) > 0:
            if stop() or self._stop():
                raise WaitStoppedError(
                    f"stopped while waiting for storage: {self._waiting[threading.get_ident()]}"
                )
            time.sleep(min(left, _POLL))

    def _note_end(self, waited: StorageWait) -> None:
        """Log a wait that is over, with those before it that came too soon to be logged."""
        now = time.monotonic()
        with self._lock:
            before = self._unlogged
            self._unlogged = StorageWait(
                waited.what, before.seconds + waited.seconds, before.tries + waited.tries
            )
            if now - self._logged_at < TELL_EVERY:
                return
            total, self._unlogged, self._logged_at = self._unlogged, StorageWait("", 0.0, 0), now
        seconds = round(total.seconds, 1)
        logger().warning(f"storage works again: {total.what}", waited=seconds, tries=total.tries)
        self._tell(total)


def _named(error: OSError, path: Path | None) -> OSError:
    if error.filename is None and error.errno is not None and path is not None:
        error.filename = str(path)
    return error


_waits = StorageWaits()


def storage_waits() -> StorageWaits:
    return _waits


def free_space_helps(reason: str) -> bool:
    """Whether a rank's reason for a failure is a lack of disk space."""
    return any(os.strerror(code) in reason for code in (errno.ENOSPC, errno.EDQUOT))
