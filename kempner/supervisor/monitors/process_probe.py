"""What can be seen of a process from outside, even when it runs no code of ours any more.

    python -m kempner.supervisor.monitors.process_probe PID...

says it of processes of this machine; that is how the supervisor asks another node.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    return f"process {pid}: {', '.join(told)}, waits in {waits_in}"


def is_here(host: str) -> bool:
    """Whether a host or node of that name is this one."""
    here = platform.node()
    return host in (here, here.partition(".")[0])


def of_processes(where: Mapping[str, Sequence[int]], job: str | None) -> list[str]:
    """Begin to look at processes, by node; the list grows as nodes answer.

    Those of this node are in it at once. Others are reached through the Slurm `job`, if there is
    one.
    """
    found = [of_process(pid) for host, pids in where.items() if is_here(host) for pid in pids]
    others = [host for host in where if not is_here(host)] if job is not None else []
    for host in others[:NODES_ASKED]:
        asked = (job, host, where[host], found)
        threading.Thread(target=_ask, args=asked, name=f"ask {host}", daemon=True).start()
    return found


def _ask(job: str, node: str, pids: Sequence[int], found: list[str]) -> None:
    step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    look = [sys.executable, "-m", "kempner.supervisor.monitors.process_probe", *map(str, pids)]
    try:
        done = subprocess.run(
            [*step, *look],
            timeout=_WITHIN,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        found.append(f"{node} does not answer: {error}")
        return
    found.extend(f"{node}: {line}" for line in done.stdout.splitlines())


if __name__ == "__main__":
    print(*(of_process(int(pid)) for pid in sys.argv[1:]), sep="\n")
