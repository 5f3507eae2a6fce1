"""What `kempner join` tells its agent: in the environment, and later by the agent's input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass
from typing import Self

from kempner.run.output.logs import logger
from kempner.supervisor.launchers.agents.messages import Joins

TERMS = "KEMPNER_AGENT_JOINS"
"""Variable of an agent that joins the run of another job."""


@dataclass(frozen=True)
class JoinTerms:
    """Room for a number of `ranks`, until a time (`time.monotonic`, seconds; None: without end).
    `job` is the Slurm id, empty outside of a job."""

    job: str
    ranks: int
    until: float | None

    @property
    def now(self) -> Joins:
        """As the supervisor is told, which has a clock of its own."""
        left = None if self.until is None else max(0.0, self.until - time.monotonic())
        return Joins(self.job, self.ranks, left)

    def environment(self) -> dict[str, str]:
        """As a variable."""
        return {TERMS: json.dumps(asdict(self))}

    @classmethod
    def taken_from(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Take it out of the environment again; None for an agent of the supervisor's own job."""
        text = environ.pop(TERMS, None)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True)
class Departure:
    """The agent has to leave within `seconds`."""

    seconds: float
    reason: str

    def line(self) -> bytes:
        """As the agent reads it."""
        return json.dumps(asdict(self)).encode() + b"\n"


def hear_departures(heard: Callable[[Departure | None], None]) -> None:
    """Pass on what comes by this process's input; None once who started it has ended."""
    for line in sys.stdin.buffer:
        try:
            heard(Departure(**json.loads(line)))
        except (ValueError, TypeError) as error:
            logger().warning("not understood", line=line.decode(errors="replace"), why=str(error))
    heard(None)
