"""One owner per run: a lease that its holder keeps renewing.

An owner is a supervisor, or rank 0 without one. Each creates its own file, numbered by exclusive
creation; the highest number owns the run. The owner keeps increasing a counter in its file. A later
process watches: if the counter changes, the owner lives; if it stands still for the time of the
lease, by the watcher's own clock, the owner is dead, and the watcher may take the next number. No
file is deleted, or written by two processes, so no two can hold the same number, and an owner that
wakes up after a long sleep finds a higher one. This needs no file locks, and compares no two
clocks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Self

from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.retry import StorageUnavailableError, describe, empty, storage_waits
from kempner.run.process.signals import inbox
from kempner.run.process.threads import AwakeClock, helper_thread, started
from kempner.run.process.whereabouts import start_ticks
from kempner.run.record.attempts import CURRENT, SupersededError
from kempner.run.record.run_dir import RunDirectory, cannot_keep

RENEWALS = 15
"""Renewals within the time of a lease: if all of them fail, it is lost."""

RELEASED = "released"
"""What an owner writes instead of its counter when it leaves."""

_WIDTH = 20


@dataclass(frozen=True)
class Holder:
    """An owner. `machine` identifies the boot, the PID namespace and the network cards (two virtual
    machines of one snapshot share the first two); within it, `pid` and `started` (clock ticks,
    proc(5)) identify the process. `lasts` is its lease in seconds."""

    host: str
    machine: str
    pid: int
    started: int
    job: str | None
    restarts: int
    since: str
    lasts: float

    @classmethod
    def here(cls, lasts: float, restarts: int = 0) -> Self:
        """This process; `restarts` is how often its job was requeued."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        return cls(
            host=platform.node(),
            machine=f"{boot}/{namespace}/{_cards()}",
            pid=os.getpid(),
            started=start_ticks(os.getpid()) or 0,
            job=os.environ.get("SLURM_JOB_ID"),
            restarts=restarts,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            lasts=lasts,
        )

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


@dataclass(frozen=True)
class LeaseReading:
    """The content of a supervisor's file; `holder` is None while it is empty."""

    number: int
    holder: Holder | None
    beat: str


def reason_to_take(seen: LeaseReading, me: Holder, process_lives: bool) -> str:
    """Why the lease can be taken without waiting; empty if the owner may be alive. `process_lives`:
    the process in `seen` runs on this machine."""
    holder = seen.holder
    if seen.beat == RELEASED:
        return "its supervisor has exited"
    if holder is None:
        return ""
    if holder.machine == me.machine and not process_lives:
        return f"its supervisor, {holder}, is dead"
    if me.job is not None and holder.job == me.job and holder.restarts < me.restarts:
        return f"job {me.job}, in which {holder} owned it, was started again"
    return ""


class Lease:
    """This process's claim on a run, from `acquire` to `release`."""

    def __init__(self, folder: Path, number: int, holder: Holder, descriptor: int) -> None:
        self._folder, self._number = folder, number
        self._descriptor: int | None = descriptor
        self._lasts = holder.lasts
        self._beats = 0
        self._over = threading.Event()
        self.lost = False
        """Whether another supervisor has taken the run over."""
        self.stop_asked = False
        """Whether `ask_to_stop` asked this owner; if it traps SIGTERM, it has received one, too."""
        self._thread = helper_thread(self._renew, "lease")

    @classmethod
    def acquire(cls, run: RunDirectory, lasts: float, restarts: int = 0) -> Self:
        """Become the run's owner; waits while another owner may be alive. Raises `UsageError` if
        one is, or if the run's directory cannot be written, and as `StorageWaits.retry` if that may
        be temporary."""
        worked = restarts > 0 or os.access(run.attempts / CURRENT, os.R_OK)
        try:
            _make_folder(run.supervisors, worked)
            acquire = partial(cls._acquire, run.supervisors, Holder.here(lasts, restarts))
            return storage_waits().retry(acquire, worked, path=run.supervisors)
        except OSError as error:
            raise cannot_keep(run, error) from error

    @classmethod
    def _acquire(cls, folder: Path, me: Holder) -> Self:
        while True:
            before = look(folder)
            if before is not None:
                wait_until_free(folder, before, me)
            number = before.number + 1 if before is not None else 1
            try:
                lease = cls(folder, number, me, _create(folder / str(number), me))
            except FileExistsError:
                continue  # another process was faster: watch that one
            started(lease._thread)
            return lease

    def check(self) -> None:
        """Raise `SupersededError` if another supervisor has taken the run over; raises as
        `StorageWaits.retry` if the files cannot be read."""
        newest = storage_waits().retry(partial(look, self._folder), True, path=self._folder)
        self.lost = self.lost or (newest is not None and newest.number > self._number)
        if self.lost:
            who = f" by {newest.holder}" if newest is not None and newest.holder else ""
            raise SupersededError(
                f"this run was taken over{who}, since this supervisor did not renew its lease for "
                f"{self._lasts:g} s; its ranks were killed, and the last commit is intact"
            )

    def release(self) -> None:
        """Give the run up, so that the next owner need not wait."""
        self._over.set()
        self._thread.join()
        with suppress(OSError):  # then the lease expires
            self._write(RELEASED)
        self._close()

    def _renew(self) -> None:
        """The thread. While the file system fails, it only tries again."""
        failing_since = None
        while not self._over.wait(self._lasts / RENEWALS):
            self._beats += 1
            try:
                self._write(str(self._beats))
                newest = look(self._folder)
                asked = not self.stop_asked and stop_request(self._folder, self._number).exists()
            except OSError as error:
                if failing_since is None:
                    failing_since = time.monotonic()
                    logger().warning(f"waiting for storage: the lease: {describe(error)}")
                continue
            if failing_since is not None:
                seconds = round(time.monotonic() - failing_since, 1)
                logger().warning("storage works again: the lease is renewed", after=seconds)
                failing_since = None
            if asked:
                self.stop_asked = True
                if inbox().installed:  # otherwise the signal would end this process without a save
                    os.kill(os.getpid(), signal.SIGTERM)
            if newest is not None and newest.number > self._number:
                self.lost = True
                return

    def _write(self, beat: str) -> None:
        """Raises `OSError`, and then opens the file again next time: a stale descriptor stays
        stale."""
        try:
            if self._descriptor is None:
                path = self._folder / str(self._number)
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(self._descriptor, beat.ljust(_WIDTH).encode(), 0)
            os.fsync(self._descriptor)
        except OSError:
            self._close()
            raise

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):  # a server that has forgotten it
                os.close(descriptor)


def wait_until_free(
    folder: Path, seen: LeaseReading, me: Holder, pause: Callable[[float], None] = time.sleep
) -> None:
    """Return when the owner that was `seen` is known to be gone: at once if this machine or Slurm
    knows it, otherwise when its lease expires. Raises `UsageError`, naming the owner, if it is
    alive."""
    clock, first, warned = AwakeClock(), seen, False
    lasts = seen.holder.lasts if seen.holder is not None else me.lasts
    while not (reason := reason_to_take(seen, me, holder_lives(seen.holder))):
        if seen != first:
            raise UsageError(
                f"this run has a supervisor: {seen.holder or 'one that has just begun'}; stop that "
                "one first, or let it run"
            )
        if clock.now() > lasts:
            reason = f"{seen.holder or 'its supervisor'} did not renew its lease for {lasts:g} s"
            break
        if not warned:
            warned = True
            logger().warning(f"run is owned by {seen.holder}; waiting {lasts:g} s for its lease")
        pause(min(1.0, lasts / RENEWALS / 2))
        seen = look(folder) or seen
    if seen.beat != RELEASED:
        logger().warning(f"taking over the run: {reason}")


def is_owned(folder: Path, pause: Callable[[float], None] = time.sleep) -> bool:
    """Whether a run has a living owner. For a process of this machine the answer comes at once, for
    others with their next renewal; without one within three times the interval, the owner counts as
    dead. Raises `OSError`."""
    first = look(folder)
    if first is None or first.beat == RELEASED or first.holder is None:
        return False
    here = Holder.here(first.holder.lasts)
    if first.holder.machine == here.machine:
        return holder_lives(first.holder)
    clock, between = AwakeClock(), first.holder.lasts / RENEWALS
    while clock.now() < 3 * between:
        pause(between / 4)
        if look(folder) != first:
            return True
    return False


def stop_request(folder: Path, number: int) -> Path:
    return folder / f"{number}.stop"


def ask_to_stop(folder: Path) -> bool:
    """Ask the owner of a run to stop for good, from any machine that sees the run's directory; the
    owner looks with each renewal. Returns False if it was asked before, or if there is no owner.
    Raises `OSError`."""
    seen = look(folder)
    if seen is None:
        return False
    try:
        stop_request(folder, seen.number).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def look(folder: Path) -> LeaseReading | None:
    """The newest supervisor's file, or None before the first."""
    numbers = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    if not numbers:
        return None
    beat, _, rest = (folder / str(max(numbers))).read_text().partition("\n")
    try:
        holder = Holder(**json.loads(rest))
    except (TypeError, ValueError):
        holder = None  # not written yet, or by another version of kempner
    return LeaseReading(max(numbers), holder, beat.strip())


def _cards() -> str:
    """A digest of the name of this host and of its network cards' addresses."""
    found = [platform.node()]
    with suppress(OSError):
        for card in sorted(Path("/sys/class/net").iterdir()):
            with suppress(OSError):
                if (card / "device").exists():  # not the virtual ones of containers
                    found.append((card / "address").read_text().strip())
    return hashlib.blake2b("\n".join(found).encode(), digest_size=6).hexdigest()


def _make_folder(folder: Path, worked: bool) -> None:
    """Make the folder of a run's supervisors; raises as `StorageWaits.retry`. If the run existed
    before (`worked`) and is missing, storage may be away: wait for a while before a new run begins
    in its place, and refuse if even `run.dir` is missing where storage may still be away. The first
    launch of a job may also have ended before it made either."""

    def make() -> None:
        if worked and not folder.is_dir():
            raise empty(folder)
        folder.mkdir(parents=True, exist_ok=True)

    try:
        storage_waits().retry(make, worked, path=folder)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        if not folder.parent.parent.is_dir() and not _is_mounted(folder):
            raise StorageUnavailableError(
                f"{folder.parent} is not there, nor {folder.parent.parent}, although this job was "
                "started before: is the file system mounted? If this is a new place, make it"
            ) from error
        storage_waits().retry(partial(folder.mkdir, parents=True, exist_ok=True), path=folder)


def _is_mounted(folder: Path) -> bool:
    """Whether the file system of a folder that is missing is certainly there: the nearest folder
    above it is this process's own, or lies within a mounted file system. Where one is not mounted,
    it leaves an empty folder, or nothing, in that of `/`."""
    there = next(path for path in folder.resolve().parents if path.is_dir())
    if there.is_relative_to(Path.cwd().resolve()):
        return True
    return not there.is_mount() and there.stat().st_dev != Path("/").stat().st_dev


def _create(path: Path, me: Holder) -> int:
    """A new file, open for writing. Raises `FileExistsError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, f"{'0'.ljust(_WIDTH)}\n{json.dumps(asdict(me))}\n".encode())
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):  # otherwise it would pass for another supervisor's
            path.unlink()
        os.close(descriptor)
        raise
    return descriptor


def holder_lives(holder: Holder | None) -> bool:
    return holder is not None and start_ticks(holder.pid) == holder.started
