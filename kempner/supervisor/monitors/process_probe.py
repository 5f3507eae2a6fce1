"""What can be seen of a process from outside, even when it runs no code of ours any more.

    python -m kempner.supervisor.monitors.process_probe PID...

says it of processes of this machine; that is how the supervisor asks another node.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from kempner.cluster.slurm.command import probe_environment
from kempner.supervisor.control.events import Connected
from kempner.supervisor.nodes.presence import came_after, still_runs, thread_states

NOT_KILLED = "does not end though it was killed: it is stuck in the kernel"

_FIELDS = ("State", "Threads", "VmRSS", "SigBlk")

NODES_ASKED = 8
"""Nodes that are asked about their processes; of the others the first few are typical."""

_WITHIN = 15.0
"""Seconds that a node gets to answer; a dead one never does."""


def of_process(pid: int, proc: Path = Path("/proc")) -> str:
    """Its state, and the kernel function in which it waits (proc(5)): one line.

    A process that is stopped shows `T`, one that is stuck on storage `D`.
    """
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
        waits_in = (proc / str(pid) / "wchan").read_text().strip() or "0"
    except OSError as error:
        return f"process {pid} cannot be looked at: {error.strerror}"
    told = [" ".join(line.split()) for line in lines if line.split(":")[0] in _FIELDS]
    stuck = thread_states(pid, proc).count("D")
    told += [f"{stuck} thread{'s' * (stuck > 1)} in D (disk sleep)"] if stuck else []
    return f"process {pid}: {', '.join(told)}, waits in {waits_in}"


def is_here(host: str) -> bool:
    """Whether a host or node of that name is this one."""
    here = platform.node()
    return host in (here, here.partition(".")[0])


def still_here(joined: Mapping[int, Connected]) -> dict[int, Connected]:
    """Those of the ranks whose processes run on this host, whatever they have said."""
    return {rank: there for rank, there in joined.items() if _runs_here(there)}


def describe_stuck(rank: int, there: Connected) -> str:
    """What is known of a rank that outlives its SIGKILL; empty if it is seen to be gone."""
    here = is_here(there.host)
    if here and not _runs_here(there):
        return ""
    seen = f" ({of_process(there.pid)})" if here else ""
    return f"rank {rank}, process {there.pid}, {NOT_KILLED}{seen}"


def _runs_here(there: Connected) -> bool:
    """Whether a rank's process is on this host, and has not ended."""
    ours = is_here(there.host) and came_after(there.pid, os.getpid())
    return ours and still_runs(there.pid)


class ProcessLook:
    """A look at processes, by node: `lines` grows as nodes answer.

    Those of this node are in it at once. Others are reached through the Slurm `job`, if there is
    one.
    """

    def __init__(self, where: Mapping[str, Sequence[int]], job: str | None) -> None:
        self.lines = [
            of_process(pid) for host, pids in where.items() if is_here(host) for pid in pids
        ]
        others = [host for host in where if not is_here(host)] if job is not None else []
        self._asked = [
            threading.Thread(
                target=self._ask, args=(job, host, where[host]), name=f"ask {host}", daemon=True
            )
            for host in others[:NODES_ASKED]
        ]
        for thread in self._asked:
            thread.start()

    @property
    def complete(self) -> bool:
        """Whether every node that was asked has answered, or will not."""
        return not any(thread.is_alive() for thread in self._asked)

    def _ask(self, job: str, node: str, pids: Sequence[int]) -> None:
        step = ["srun", f"--jobid={job}", "--overlap", "--gres=none", "--nodes=1", "--ntasks=1"]
        look = [sys.executable, "-m", "kempner.supervisor.monitors.process_probe", *map(str, pids)]
        try:
            done = subprocess.run(
                [*step, f"--nodelist={node}", *look],
                env=probe_environment(os.environ),
                timeout=_WITHIN,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                check=True,
            )
        except (subprocess.SubprocessError, OSError) as error:
            self.lines.append(f"{node} does not answer: {error}")
            return
        self.lines.extend(f"{node}: {line}" for line in done.stdout.splitlines())


if __name__ == "__main__":
    print(*(of_process(int(pid)) for pid in sys.argv[1:]), sep="\n")
