"""Exit codes of ranks and supervisor, and the errors that carry them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of kempner's processes."""

    COMPLETED = 0
    """All steps are done and committed."""
    CRASHED = 1
    """An unexpected exception; the log has its traceback."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    BAD_DATA = 65
    """Data or a checkpoint cannot be used."""
    STORAGE_UNAVAILABLE = 69
    """Storage that worked before, or may work soon, has failed for too long."""
    CHECKPOINT_FAILED = 74
    """A checkpoint could not be written."""
    STOPPED = 75
    """Stopped on request, with as much committed as there was time for: start again to continue."""
    PEERS_LOST = 76
    """Another rank is gone."""
    HUNG = 77
    """No progress."""
    DIVERGED = 78
    """The loss diverged, and rollbacks did not help."""
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
