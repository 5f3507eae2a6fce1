"""Why a run stops: the one list of reasons, which travels from where a reason is known to every
rank, the ledger, the last line of the log and `kempner status`.

A rank imports this before torch, and the supervisor never imports torch.
"""

from __future__ import annotations

import signal
from enum import IntEnum
from typing import Self

LEFT_EARLY = "stopped before training began"
"""How the last words of a rank begin that has left before it was part of the process group."""


class StopReason(IntEnum):
    """Why the ranks stop; 0 is no stop.

    Ordered by how much a reason says, and of those that say as much by how pressing it is. Where
    several are known, the greatest counts: of what all ranks vote for, and of what the supervisor
    learns one after the other.
    """

    NONE = 0
    """No stop was asked for."""
    GROW = 1
    """The run continues at once, on nodes that it takes back."""
    NODE_LEAVES = 2
    """The run continues at once, without a node that has to leave it."""
    SIGNAL = 3
    """A stop signal came, and the cause is unknown."""
    PEER_STOPPED = 4
    """A rank was asked to stop alone, and the others cannot go on without it."""
    SUPERVISOR_LOST = 5
    """The supervisor is gone, or has said nothing for too long."""
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
    """The job was cancelled: it does not come back by itself."""

    @property
    def ends_run(self) -> bool:
        """Whether the run ends here for now: it is not started again at once."""
        return self is not StopReason.NONE and not self.changes_nodes

    @property
    def changes_nodes(self) -> bool:
        """Whether the run continues at once, on other nodes."""
        return self in (StopReason.GROW, StopReason.NODE_LEAVES)

    @property
    def label(self) -> str:
        """As the ledger, the logs and the control protocol spell it: `time_limit`."""
        return self.name.lower()

    @property
    def words(self) -> str:
        """As a person reads it: `time limit`."""
        return self.label.replace("_", " ")

    @classmethod
    def of_label(cls, label: object) -> Self:
        """The reason that is spelt so; NONE for anything else, such as an older ledger's words."""
        return next((reason for reason in cls if reason.label == label), cls(0))


def reason_of_signal(number: signal.Signals, supervisor_gone: bool = False) -> StopReason:
    """What a stop signal says by itself.

    A rank whose supervisor is gone was signalled by the kernel for that, if not by Ctrl-C.
    """
    if number is signal.SIGINT:
        return StopReason.INTERRUPT
    return StopReason.SUPERVISOR_LOST if supervisor_gone else StopReason.SIGNAL
