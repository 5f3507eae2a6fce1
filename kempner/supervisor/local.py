"""Ranks as children of the supervisor on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from kempner.cluster.ports import free_port
from kempner.run.attempts import Attempt
from kempner.run.launch import Launch
from kempner.run.layout import RunDirectory
from kempner.run.signals import STOP_SIGNALS
from kempner.supervisor.policy import RankExit

_LOOPBACK = "127.0.0.1"


class LocalLauncher:
    """`size` ranks here, each in a session of its own.

    A terminal's Ctrl-C therefore reaches the supervisor alone. Each rank asks the kernel to be told
    when the supervisor dies, so none outlives it unnoticed. Rank 0 shares the supervisor's output;
    the others' goes to the attempt's folder.
    """

    def __init__(self, run: RunDirectory, size: int) -> None:
        self._run, self._size = run, size
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()

    def start(self, attempt: Attempt, arguments: Sequence[str]) -> None:
        """Start every rank as `kempner train <arguments>`."""
        port = free_port(_LOOPBACK, salt=f"{self._run.path.absolute()}:{attempt.nonce}")
        command = [sys.executable, "-m", "kempner", "train", *arguments]
        # Blocked here, the signals are blocked in the children from their first instruction until
        # they trap them: one that comes while their interpreter starts is kept, not fatal.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for rank in range(self._size):
                self._children[rank] = self._spawn(rank, attempt, port, command)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ask_to_stop(self) -> None:
        """Send SIGTERM to every living rank."""
        for child in self._children.values():
            if child.poll() is None:
                child.terminate()

    def kill(self) -> None:
        """Send SIGKILL to every living rank."""
        for rank, child in self._children.items():
            if child.poll() is None:
                self._killed.add(rank)
                child.kill()

    def ended(self) -> list[RankExit]:
        """Ranks that have ended since the last call."""
        exits = [
            RankExit(rank, status, ended_by_us=rank in self._killed)
            for rank, child in self._children.items()
            if (status := child.poll()) is not None
        ]
        for gone in exits:
            del self._children[gone.rank]
        return exits

    def alive(self) -> bool:
        """Whether any rank has not been seen to end."""
        return bool(self._children)

    def _spawn(
        self, rank: int, attempt: Attempt, port: int, command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **Launch(attempt, os.getpid()).environment(),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
        }
        environment.pop("TORCHELASTIC_RUN_ID", None)
        if rank == 0:
            return subprocess.Popen(
                command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
            )
        with open(self._run.output(attempt.number, rank), "ab") as output:
            return subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
