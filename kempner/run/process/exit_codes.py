"""Exit codes of ranks and supervisor, and the errors that carry them."""

from __future__ import annotations

import errno
import os
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit statuses of kempner's processes."""

    COMPLETED = 0
    """All steps are done and committed."""
    CRASHED = 1
    """An unexpected exception; the log has its traceback."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    BAD_DATA = 65
    """Data or a checkpoint was read and cannot be used."""
    STORAGE_UNAVAILABLE = 69
    """Storage that worked before, or may work soon, cannot be read, or has failed for too long."""
    CHECKPOINT_FAILED = 74
    """A checkpoint, or what a command makes, could not be written: no room, or storage failed."""
    STOPPED = 75
    """Stopped on request, with as much committed as there was time for: start again to continue."""
    PEERS_LOST = 76
    """Another rank is gone."""
    HUNG = 77
    """No progress."""
    DIVERGED = 78
    """The loss diverged, and rollbacks did not help."""
    AFTER_TRAINING = 79
    """The program failed after its loop: training is complete, and all steps are committed."""
    INTERRUPTED = 130
    """Exited at once on a second Ctrl-C; the last commit is intact."""


class RunError(Exception):
    """Something that a person can act on: one sentence, shown without a traceback.

    `code` is the exit status of the process that this error ends.
    """

    code: ExitCode = ExitCode.CRASHED


class UsageError(RunError):
    """What was asked for cannot be done as asked."""

    code = ExitCode.USAGE


class DataError(RunError):
    """A token file, an index or a checkpoint is missing, damaged or does not fit."""

    code = ExitCode.BAD_DATA


class MismatchError(RunError):
    """A checkpoint is whole, and of another program, other data or another number of ranks."""

    code = ExitCode.BAD_DATA


class CannotReadError(RunError):
    """A file that a command needs cannot be read now, though its path is right."""

    code = ExitCode.STORAGE_UNAVAILABLE


class CannotWriteError(RunError):
    """What a command makes cannot be written now, though its path is right."""

    code = ExitCode.CHECKPOINT_FAILED


class UnfitNodeError(RunError):
    """This node is at fault; on another one the error would not have happened."""


class NotSharedError(UnfitNodeError):
    """This node does not see a file that another node created."""


class CheckpointWriteError(RunError):
    """A checkpoint could not be committed."""

    code = ExitCode.CHECKPOINT_FAILED


class PeersLostError(RunError):
    """Another rank is gone, or never came."""

    code = ExitCode.PEERS_LOST


class DivergedError(RunError):
    """The loss diverged, and a rollback does not help."""

    code = ExitCode.DIVERGED


_WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO),
}
"""Error numbers that another path, or another right, would end."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cannot_read(path: Path | str, error: OSError, advice: str = "") -> RunError:
    """What to raise where `path`, which a command was given, cannot be read.

    `UsageError` if the path is wrong, `CannotReadError` if storage is at fault. `advice` is a
    clause that says what to do.
    """
    kind = UsageError if error.errno in _WRONG_PATH else CannotReadError
    return kind(_sentence(path, "read", error, advice))


def cannot_write(path: Path | str, error: OSError, advice: str = "") -> RunError:
    """The same for a path that a command is to write to: `UsageError` or `CannotWriteError`."""
    kind = UsageError if error.errno in _WRONG_PATH else CannotWriteError
    return kind(_sentence(path, "written", error, advice))


def cannot_use(error: OSError) -> RunError:
    """The same for an unexpected error that names its file."""
    if error.errno in _NO_ROOM:
        return cannot_write(str(error.filename), error)
    kind = UsageError if error.errno in _WRONG_PATH else CannotReadError
    return kind(f"{error.filename}: {os.strerror(error.errno or 0)}")


def _sentence(path: Path | str, verb: str, error: OSError, advice: str) -> str:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{path} cannot be {verb}: {reason}" + (f"; {advice}" if advice else "")
