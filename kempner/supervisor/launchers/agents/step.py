"""A Slurm step of agents: srun, and what it says of its tasks."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf

from kempner.cluster.machine.job_place import JobPlace, find_place
from kempner.cluster.slurm.command import (
    SlurmError,
    patiently,
    see_step_end,
    start_step,
    step_environment,
)
from kempner.run.output.logs import logger
from kempner.run.process.threads import start_thread
from kempner.supervisor.launchers.agents.messages import ADDRESSES, PORT, STEP, TOKEN
from kempner.supervisor.launchers.srun import StepErrors


class AgentStep:
    """One srun with an agent on each of some `nodes`, started again while Slurm cannot do it.

    `ended` is called with the step, each task of it that has ended, and its exit status.
    """

    def __init__(
        self, number: int, nodes: Collection[str], ended: Callable[[AgentStep, int, int], None]
    ) -> None:
        self.number, self.nodes = number, frozenset(nodes)
        self.gone: set[str] = set()
        """Nodes whose agent has ended, or was given up."""
        self.began = time.monotonic()
        self._ended = ended
        self._srun: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it. Raises `SlurmError` if there is no srun here."""
        self._srun = patiently(lambda: start_step(command, environ), START_WITHIN)
        self._thread = start_thread("agents' srun", lambda: self._wait(command, environ))

    @property
    def alive(self) -> bool:
        """Whether srun is there, or is to be started again."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waits(self) -> bool:
        """Whether srun could not start the tasks, and is to be started again."""
        return self.alive and self._srun is not None and self._srun.returncode is not None

    def covers(self, node: str) -> bool:
        """Whether there is an agent of this step on a node, or one may come."""
        return self.alive and node in self.nodes and node not in self.gone

    def end(self, patience: float) -> None:
        """Wait for srun, whose tasks were sent away; then have it kill them, and leave it behind if
        it cannot."""
        self._over.set()
        srun = self._srun
        if srun is None:
            return
        with suppress(subprocess.TimeoutExpired):
            srun.wait(patience)
            return
        srun.terminate()
        with suppress(subprocess.TimeoutExpired):
            srun.wait(KILLED_WITHIN)
            return
        srun.kill()

    def _wait(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Until the tasks have ended. While Slurm cannot start them, they are started again."""
        first = [self._srun]

        def see() -> int:
            srun = first.pop() if first else None
            if srun is None:
                if self._over.is_set():
                    return 1
                srun = self._srun = start_step(command, environ)
            return see_step_end(srun, StepErrors(self._hear_end).hear)

        try:
            status = patiently(see, inf, _say_why)
        except SlurmError as error:
            _say_why(error)
            status = 1
        logger().info("the agents' srun has ended", step=self.number, status=status)

    def _hear_end(self, task: int, status: int) -> None:
        self._ended(self, task, status)


def agent_environment(addresses: Sequence[str], port: int, token: str, step: int) -> dict[str, str]:
    """The variables of a step of agents: this process's own, and where they find it."""
    where = {ADDRESSES: ",".join(addresses), PORT: str(port), TOKEN: token, STEP: str(step)}
    environ = step_environment(os.environ, find_place(os.environ) is JobPlace.STEP) | where
    environ.pop("TORCHELASTIC_RUN_ID", None)
    return environ


KILLED_WITHIN = 5.0
"""Seconds for srun to kill tasks; it waits for nodes that are gone, and we do not."""

START_WITHIN = 300.0
"""Seconds for which srun is started again and again: the machine may be short of memory."""


def _say_why(error: SlurmError) -> None:
    logger().warning("the agents could not be started", reason=str(error))
