"""What a supervisor tells the ranks it launches, as environment variables.

The rank's place in the world travels under torch's own names (RANK, WORLD_SIZE, ...); these are
the rest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kempner.run.attempts import Attempt

_ATTEMPT = "KEMPNER_ATTEMPT"
_NONCE = "KEMPNER_ATTEMPT_NONCE"
_SUPERVISOR = "KEMPNER_SUPERVISOR_PID"


@dataclass(frozen=True)
class Launch:
    """The attempt that a rank belongs to, and the process id of a supervisor on its own node."""

    attempt: Attempt
    supervisor_pid: int

    def environment(self) -> dict[str, str]:
        """The variables to add to a rank's environment."""
        return {
            _ATTEMPT: str(self.attempt.number),
            _NONCE: self.attempt.nonce,
            _SUPERVISOR: str(self.supervisor_pid),
        }

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch | None:
        """What the supervisor said, or None where there is none."""
        if _ATTEMPT not in environ:
            return None
        return cls(
            attempt=Attempt(number=int(environ[_ATTEMPT]), nonce=environ[_NONCE]),
            supervisor_pid=int(environ[_SUPERVISOR]),
        )
