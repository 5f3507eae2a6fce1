"""Local launcher: ranks are children of the supervisor on this machine."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from kempner.cluster.network.ports import free_port
from kempner.cluster.slurm.hostlist import node_name
from kempner.run.control.launch_env import Launch
from kempner.run.process.signals import STOP_SIGNALS
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult, measure
from kempner.supervisor.policy.outcome import RankExit

_LOOPBACK = "127.0.0.1"


class LocalLauncher:
    """`size` ranks here, each in a session of its own.

    A terminal's Ctrl-C therefore reaches the supervisor alone. Each rank asks the kernel to be told
    when the supervisor dies, so none outlives it unnoticed. Rank 0 shares the supervisor's output;
    the others' goes to the attempt's folder.
    """

    address = _LOOPBACK

    def __init__(self, run: RunDirectory, size: int) -> None:
        self._run, self.size = run, size
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._waiter: threading.Thread | None = None

    @property
    def nodes(self) -> Sequence[str]:
        """This machine."""
        return [node_name(os.environ)]

    def survey(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """Ask this machine."""
        return [measure(question)]

    def avoid(self, suspects: Mapping[str, str]) -> None:
        """Nothing: there is no other machine."""

    def unavoidable(self, suspects: Collection[str]) -> Sequence[str]:
        """None: no other machine would be any better."""
        return ()

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start every rank as `program`, and wait for them on a thread."""
        port = free_port(_LOOPBACK, salt=f"{self._run.path.absolute()}:{launch.attempt.nonce}")
        # Blocked here, the signals are blocked in the children from their first instruction until
        # they trap them: one that comes while their interpreter starts is kept, not fatal.
        block = STOP_SIGNALS if program.ours else ()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, block)
        try:
            for rank in range(self.size):
                self._children[rank] = self._spawn(rank, launch, port, program.command)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._waiter = threading.Thread(target=self._wait, args=(post,), name="wait", daemon=True)
        self._waiter.start()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to every living rank."""
        for child in self._children.values():
            child.terminate()

    def kill(self) -> None:
        """Send SIGKILL to every living rank."""
        for rank, child in self._children.items():
            if child.poll() is None:
                self._killed.add(rank)
                child.kill()

    def alive(self) -> bool:
        """Whether any rank has not been seen to end."""
        return self._waiter is not None and self._waiter.is_alive()

    def prepare_again(self, lost: Sequence[str]) -> None:
        """This machine is there: wait until the last rank is gone."""
        if self._waiter is not None:
            self._waiter.join()
        self._children.clear()
        self._killed.clear()

    def _wait(self, post: Callable[[RankExit], None]) -> None:
        """Post every end as it comes."""
        with selectors.DefaultSelector() as selector:
            for rank, child in self._children.items():
                selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    status = self._children[key.data].wait()
                    post(RankExit(key.data, status, ended_by_us=key.data in self._killed))

    def _spawn(
        self, rank: int, launch: Launch, port: int, command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **replace(launch, parent=os.getpid()).environment(),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
        }
        environment.pop("TORCHELASTIC_RUN_ID", None)
        if rank == 0:
            return subprocess.Popen(
                command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
            )
        with open(self._run.output(launch.attempt.number, rank), "ab") as output:
            return subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
