"""What can be seen of a process from outside, even when it runs no code of ours any more."""

from __future__ import annotations

from pathlib import Path

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
    return f"process {pid}: {', '.join(told)}, waits in {waits_in}"
