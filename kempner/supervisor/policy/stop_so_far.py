"""What has been heard of how an attempt ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from kempner.run.process.signals import Received
from kempner.run.process.stop_reason import StopReason
from kempner.run.record.events.stop import StopRequested
from kempner.supervisor.policy.outcome import OwnLoop
from kempner.supervisor.policy.stop import StandingStop


@dataclass
class StopSoFar:
    """What has been heard of a stop, and of the end of a program's own `loop`.

    `standing` is what the ranks were told, None until they are asked to stop; `said` is why they
    stop by their own words. `unrecorded` is what the ledger does not tell yet, and since when.
    `by_user` is whether a person asked for it: then no signal is a warning of Slurm's.
    """

    signals: list[Received] = field(default_factory=list)
    standing: StandingStop | None = None
    said: StopReason = StopReason.NONE
    unrecorded: tuple[StopRequested, float] | None = None
    loop: OwnLoop = OwnLoop.UNKNOWN
    by_user: bool = False

    @property
    def reason(self) -> StopReason:
        """Why the ranks were asked to stop, or said that they do; NONE if nobody asked them."""
        if self.standing is None:
            return StopReason.NONE
        if self.standing.reason is StopReason.PEER_STOPPED and self.said:
            return self.said  # they know why that one was asked
        return max(self.standing.reason, self.said)
