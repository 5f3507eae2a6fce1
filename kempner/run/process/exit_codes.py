"""Why a run stops, how its processes exit, and the errors that carry an exit code.

A rank imports this before torch, and the supervisor never imports torch.
"""

from __future__ import annotations

import errno
import os
import signal
from enum import IntEnum
from pathlib import Path
from typing import Self


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
    """An error that the user can act on: one sentence, shown without a traceback. `code` is the
    exit status of a process that ends with it."""

    code: ExitCode = ExitCode.CRASHED


class UsageError(RunError):
    code = ExitCode.USAGE


class DataError(RunError):
    """A token file, an index or a checkpoint is missing, damaged or does not fit."""

    code = ExitCode.BAD_DATA


class MismatchError(RunError):
    """A checkpoint is intact, but of another program, other data or another number of ranks."""

    code = ExitCode.BAD_DATA


class CannotReadError(RunError):
    """A file that a command needs cannot be read now, though its path is right."""

    code = ExitCode.STORAGE_UNAVAILABLE


class CannotWriteError(RunError):
    """The output of a command cannot be written now, though its path is right."""

    code = ExitCode.CHECKPOINT_FAILED


class UnfitNodeError(RunError):
    """This node is at fault; on another one the error would not have happened."""


class NotSharedError(UnfitNodeError):
    """This node does not see a file that another node created."""


class CheckpointWriteError(RunError):
    code = ExitCode.CHECKPOINT_FAILED


class PeersLostError(RunError):
    code = ExitCode.PEERS_LOST


class DivergedError(RunError):
    code = ExitCode.DIVERGED


class CorruptionError(RunError):
    """This rank computes or remembers wrong bits, or one of two ranks does."""


_WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO),
}
"""Error numbers that mean a wrong path, or missing rights."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cannot_read(path: Path | str, error: OSError, advice: str = "") -> RunError:
    """The error to raise if `path`, which the user gave, cannot be read: `UsageError` if the path
    is wrong, `CannotReadError` if storage is at fault. `advice` says what to do."""
    kind = UsageError if error.errno in _WRONG_PATH else CannotReadError
    return kind(_sentence(path, "read", error, advice))


def cannot_write(path: Path | str, error: OSError, advice: str = "") -> RunError:
    """As `cannot_read`, for a path to write to: `UsageError` or `CannotWriteError`."""
    kind = UsageError if error.errno in _WRONG_PATH else CannotWriteError
    return kind(_sentence(path, "written", error, advice))


def cannot_use(error: OSError) -> RunError:
    """As `cannot_read`, for an unexpected error that names its file."""
    if error.errno in _NO_ROOM:
        return cannot_write(str(error.filename), error)
    kind = UsageError if error.errno in _WRONG_PATH else CannotReadError
    return kind(f"{error.filename}: {os.strerror(error.errno or 0)}")


def _sentence(path: Path | str, verb: str, error: OSError, advice: str) -> str:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{path} cannot be {verb}: {reason}" + (f"; {advice}" if advice else "")


LEFT_EARLY = "stopped before training began"
"""How the outcome of a rank begins that left before it was part of the process group."""


class StopReason(IntEnum):
    """Why the ranks stop; 0 is no stop. Ordered by how specific a reason is, then by how urgent: if
    the ranks' votes or the supervisor have several, the greatest counts."""

    NONE = 0
    """No stop was asked for."""
    GROW = 1
    """The run continues at once, on nodes that it takes back."""
    NODE_LEAVES = 2
    """The run continues at once, without a node that has to leave it."""
    SIGNAL = 3
    """A stop signal arrived, and the cause is unknown."""
    PEER_STOPPED = 4
    """A rank was asked to stop alone, and the others cannot go on without it."""
    SUPERVISOR_LOST = 5
    """The supervisor is gone, or has been silent for too long."""
    INTERRUPT = 6
    """A user pressed Ctrl-C (SIGINT)."""
    OPERATOR = 7
    """A user sent the job a signal, long before its end."""
    DEADLINE = 8
    """No signal came, but the supervisor knows that only the time for a checkpoint is left."""
    TIME_LIMIT = 9
    """Slurm says that the job's time limit is near or reached."""
    REQUEUE = 10
    """The job was put back into the queue, and Slurm does not tell by whom: an operator with
    `scontrol requeue`, a preemption without grace time, a lost node."""
    PREEMPTION = 11
    """A job of higher priority takes the nodes, and Slurm has said so."""
    CANCEL = 12
    """The job was cancelled: it does not restart by itself."""

    @property
    def ends_run(self) -> bool:
        return self is not StopReason.NONE and not self.changes_nodes

    @property
    def changes_nodes(self) -> bool:
        """Whether the run continues at once, on other nodes."""
        return self in (StopReason.GROW, StopReason.NODE_LEAVES)

    @property
    def label(self) -> str:
        """The form in the ledger and the logs: `time_limit`."""
        return self.name.lower()

    @property
    def words(self) -> str:
        return self.label.replace("_", " ")

    @classmethod
    def of_label(cls, label: object) -> Self:
        """The reason with this label; NONE for anything else, such as an older ledger's words."""
        return next((reason for reason in cls if reason.label == label), cls(0))


def reason_of_signal(number: signal.Signals, supervisor_gone: bool = False) -> StopReason:
    """The reason behind a stop signal; the kernel sends one to a rank whose supervisor is gone."""
    if number is signal.SIGINT:
        return StopReason.INTERRUPT
    return StopReason.SUPERVISOR_LOST if supervisor_gone else StopReason.SIGNAL
