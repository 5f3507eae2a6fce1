"""Processes on a node as seen from outside, whatever they run.

    python -m kempner.probe.processes '{"node2": [4711]}'

prints the node and which of these processes still run there, in one line of JSON;

    python -m kempner.probe.processes PID...

describes them. Both import as little as possible: the first runs on every node at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kempner.cluster.slurm.hostlist import node_name
from kempner.run.process.whereabouts import start_ticks, thread_states

_FIELDS = ("State", "Threads", "VmRSS", "SigBlk")


def still_runs(pid: int, proc: Path = Path("/proc")) -> bool:
    return any(state not in ("Z", "X") for state in thread_states(pid, proc))


def started_later_by_same_user(pid: int, earlier: int, proc: Path = Path("/proc")) -> bool:
    """Whether process `pid` has the same owner as `earlier` and was started no sooner: the pid of a
    rank in a container may be that of another process here."""
    try:
        same = (proc / str(pid)).stat().st_uid == (proc / str(earlier)).stat().st_uid
        began = start_ticks(pid, proc, zombies=True)
        earlier_began = start_ticks(earlier, proc)
    except OSError:
        return False
    return same and began is not None and earlier_began is not None and began >= earlier_began


def describe_process(pid: int, proc: Path = Path("/proc")) -> str:
    """The state of a process (`T` if stopped, `D` if stuck on storage) and the kernel function in
    which it waits (proc(5)), on one line."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
        waits_in = (proc / str(pid) / "wchan").read_text().strip() or "0"
    except OSError as error:
        return f"process {pid} cannot be looked at: {error.strerror}"
    parts = [" ".join(line.split()) for line in lines if line.split(":")[0] in _FIELDS]
    stuck = thread_states(pid, proc).count("D")
    parts += [f"{stuck} thread{'s' * (stuck > 1)} in D (disk sleep)"] if stuck else []
    return f"process {pid}: {', '.join(parts)}, waits in {waits_in}"


def answer(node: str, pids: Sequence[int]) -> str:
    return json.dumps({"node": node, "left": [pid for pid in pids if still_runs(pid)]})


def read_answer(line: str) -> tuple[str, tuple[int, ...]] | None:
    """A node, and the processes that still run there; None if the line is no answer."""
    try:
        fields = json.loads(line)
        return str(fields["node"]), tuple(int(pid) for pid in fields["left"])
    except (ValueError, TypeError, KeyError):
        return None


def main(asked: Sequence[str]) -> None:
    if asked[0].startswith("{"):
        node = node_name(os.environ)
        lines = [answer(node, json.loads(asked[0]).get(node, ()))]
    else:
        lines = [describe_process(int(pid)) for pid in asked]
    # At one go, or it mixes with other nodes' where Python's output is unbuffered.
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
