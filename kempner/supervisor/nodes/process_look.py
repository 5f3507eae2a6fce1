"""What can be seen of a process from outside, even when it runs no code of ours any more.

    python -m kempner.supervisor.nodes.process_look PID...

says it of processes of this machine; that is how the supervisor asks a node without an agent.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kempner.run.process.thread_states import thread_states

_FIELDS = ("State", "Threads", "VmRSS", "SigBlk")


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


if __name__ == "__main__":
    print(*(of_process(int(pid)) for pid in sys.argv[1:]), sep="\n")
