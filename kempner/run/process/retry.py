"""Storage that fails for a moment: what is tried again, for how long, and what is said meanwhile.

This is the one place that tells a passing failure from a permanent one. An error number means that
something cannot be read or written *now*; only what was read and is wrong is damaged. So all reads
and writes are passed to `storage_waits().retry`, which repeats them until they succeed, a stop is
asked for, or `resilience.patience` is over. An operation that never returns is not noticed here,
but by the hang detection.
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
"""Seconds until the second try, and the most between two: each is twice as long as the last."""

EMPTY_SHARE = 0.2
"""Of the patience, the share for a file that is empty and should not be: a mount that is not back
yet looks like that, but so does damage, and there may be an older checkpoint to go on from."""

TELL_EVERY = 10.0
"""Seconds between two waits that are told of one by one; what comes sooner is told with the next:
storage that fails now and then must not fill the log."""

_POLL = 0.1  # seconds between two looks whether a stop was asked for

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
"""Error numbers that say nothing about the file: it is tried again whatever happened before."""

PASSING_WHERE_IT_WORKED = frozenset(getattr(errno, name) for name in _WHERE_IT_WORKED)
"""Error numbers of a wrong path or right, unless the same thing has worked before in this run."""

T = TypeVar("T")


class StorageUnavailableError(RunError):
    """Storage has failed for longer than `resilience.patience`: another start may find it back."""

    code = ExitCode.STORAGE_UNAVAILABLE


class WaitStoppedError(RunError):
    code = ExitCode.STOPPED


def is_passing(error: OSError, worked: bool) -> bool:
    """Whether an error may be over soon; `worked` is whether the same has worked in this run."""
    return error.errno in PASSING or (worked and error.errno in PASSING_WHERE_IT_WORKED)


def empty(path: Path, length: int | None = None) -> OSError:
    """The error for a file that is there without its content, of `length` bytes if known."""
    words = "it is empty" if length is None else f"has 0 bytes instead of {length}"
    return OSError(errno.ENODATA, words, str(path))


def read_filled(path: Path) -> bytes:
    """The content of a file that must not be empty. Raises `OSError`, also if it is."""
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
    """What to do after `tries` failures in a row for `waited` seconds, with `patience` seconds in
    all."""
    if not is_passing(error, worked):
        return RetryDecision(again=False, permanent=True)
    if error.errno == errno.ENODATA:
        patience *= EMPTY_SHARE
    if waited >= patience:
        # An empty file was read, and by now it is wrong.
        return RetryDecision(again=False, permanent=error.errno == errno.ENODATA)
    pause = min(FIRST_PAUSE * 2.0 ** min(tries - 1, 20), LONGEST_PAUSE)
    return RetryDecision(again=True, pause=min(pause, patience - waited))


@dataclass(frozen=True)
class StorageWait:
    """Waits for storage that are over: for what, for how many seconds in all, in how many tries."""

    what: str
    seconds: float
    tries: int


class StorageWaits:
    """Repeats work on storage, and knows what this process waits for. Methods may be called from
    any thread. Without `configure` nothing is waited for: a command says at once what is wrong."""

    def __init__(self) -> None:
        self.patience = 0.0
        """Seconds for which a failure is tried again."""
        self.tries = 0
        """How often anything was tried again: it moves as long as this process does."""
        self._stop: Callable[[], bool] = lambda: False
        self._tell: Callable[[StorageWait], None] = lambda waited: None
        self._lock = threading.Lock()
        self._waiting: dict[int, str] = {}
        self._announced = False
        self._untold, self._told_at = StorageWait("", 0.0, 0), -TELL_EVERY

    def configure(self, patience: float, stop: Callable[[], bool] = lambda: False) -> None:
        """From now on wait for `patience` seconds, and no longer once `stop` says so."""
        self.patience, self._stop = patience, stop

    def tell_to(self, tell: Callable[[StorageWait], None]) -> None:
        """Call `tell`, from the thread that has waited, when storage works again."""
        self._tell = tell

    @property
    def waiting_for(self) -> str:
        """What is being waited for at this moment; empty if nothing is."""
        return next(iter(tuple(self._waiting.values())), "")

    def retry(
        self,
        work: Callable[[], T],
        worked: bool | Callable[[], bool] = False,
        stop: Callable[[], bool] = lambda: False,
        path: Path | None = None,
    ) -> T:
        """What `work` returns, as soon as it does not fail any more; it opens its files anew.
        `worked` is whether the same has worked before in this run; it is asked after a failure.
        `path` is what failed where the error does not say so. Raises the `OSError` of a permanent
        failure, `StorageUnavailableError` when the patience is over, and `WaitStoppedError` if this
        `stop`, or that of the process, says so during a wait."""
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
                    told = f"storage is not available{after}: {describe(failure)}"
                    raise StorageUnavailableError(told) from failure
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
        """Say that something is waited for: once, and not while another wait has just ended."""
        with self._lock:
            self._waiting[threading.get_ident()] = describe(failure)
            silent = time.monotonic() - self._told_at < TELL_EVERY
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
        """Tell of a wait that is over, with those before it that were too short to be told."""
        now = time.monotonic()
        with self._lock:
            before = self._untold
            self._untold = StorageWait(
                waited.what, before.seconds + waited.seconds, before.tries + waited.tries
            )
            if now - self._told_at < TELL_EVERY:
                return
            told, self._untold, self._told_at = self._untold, StorageWait("", 0.0, 0), now
        seconds = round(told.seconds, 1)
        logger().warning(f"storage works again: {told.what}", waited=seconds, tries=told.tries)
        self._tell(told)


def _named(error: OSError, path: Path | None) -> OSError:
    if error.filename is None and error.errno is not None and path is not None:
        error.filename = str(path)
    return error


_waits = StorageWaits()


def storage_waits() -> StorageWaits:
    return _waits


def free_space_helps(reason: str) -> bool:
    """Whether what went wrong, in a rank's words, is a lack of room."""
    return any(os.strerror(code) in reason for code in (errno.ENOSPC, errno.EDQUOT))
