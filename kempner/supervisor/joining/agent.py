"""The agent that `kempner join` has on its node: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kempner.run.process.threads import start_thread
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.supervisor.launchers.agents import node_agent
from kempner.supervisor.launchers.agents.joined.invitation import Invitation
from kempner.supervisor.launchers.agents.joined.terms import Departure, JoinTerms
from kempner.supervisor.launchers.agents.messages import ADDRESSES, PORT, STEP, TOKEN

ENDS_WITHIN = 15.0
"""Seconds for an agent to end its ranks."""


@dataclass(frozen=True)
class AgentEnded:
    """An agent has ended, with this exit code or minus the number of a signal."""

    agent: Agent
    code: int


class Agent:
    """An agent of this node, in a session of its own: it is told by its input when to leave, and
    ends with this process. `post` is called with its end, from a thread."""

    def __init__(
        self, invitation: Invitation, terms: JoinTerms, post: Callable[[AgentEnded], None]
    ) -> None:
        self.invitation, self.began = invitation, time.monotonic()
        at = {ADDRESSES: ",".join(invitation.addresses), PORT: str(invitation.port)}
        step = {STEP: str(time.time_ns() // 1_000_000)}  # higher than that of any agent before it
        self._process = subprocess.Popen(
            [sys.executable, *SAFE_MODULE, node_agent.__name__, invitation.program],
            stdin=subprocess.PIPE,
            cwd=invitation.folder,
            env=os.environ | at | {TOKEN: invitation.token} | step | terms.environment(),
            start_new_session=True,
        )
        start_thread("agent's end", lambda: post(AgentEnded(self, self._process.wait())))

    def depart(self, departure: Departure) -> None:
        """Have it ask the supervisor to let it go."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(departure.line())
            self._process.stdin.flush()

    def end(self) -> None:
        """End it, and its ranks with it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
