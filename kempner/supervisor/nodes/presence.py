"""Says that a node answers, and which processes of earlier ranks are still there.

`python -m kempner.supervisor.nodes.presence '{"node2": [4711]}'` prints one line of JSON. It
imports no more than it must: it runs on every node at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kempner.cluster.slurm.hostlist import node_name
from kempner.run.process.thread_states import thread_states


def still_runs(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether any thread of a process is left; the first one may have ended before the others."""
    return any(state not in ("Z", "X") for state in thread_states(pid, proc))


def came_after(pid: int, earlier: int, proc: Path = Path("/proc")) -> bool:
    """Whether process `pid` has the same owner as `earlier` and was started no sooner.

    A rank in a container may be known by a number that is another process's here.
    """
    try:
        same = (proc / str(pid)).stat().st_uid == (proc / str(earlier)).stat().st_uid
        return same and _started(pid, proc) >= _started(earlier, proc)
    except OSError:
        return False


def _started(pid: int, proc: Path) -> int:
    """When a process was started, in ticks since the boot (proc(5), field 22)."""
    return int((proc / str(pid) / "stat").read_text().rpartition(") ")[2].split()[19])


def answer(node: str, pids: Sequence[int]) -> str:
    """What `node` says: its name, and which of these processes still run."""
    return json.dumps({"node": node, "left": [pid for pid in pids if still_runs(pid)]})


def read_answer(line: str) -> tuple[str, tuple[int, ...]] | None:
    """A node, and the processes that still run there; None if the line is no answer."""
    try:
        told = json.loads(line)
        return str(told["node"]), tuple(int(pid) for pid in told["left"])
    except (ValueError, TypeError, KeyError):
        return None


def main(where: Mapping[str, Sequence[int]]) -> None:
    """Print what this node has to say; `where` has the processes to look for, by node."""
    node = node_name(os.environ)
    # At one go, or it mixes with other nodes' where Python's output is unbuffered.
    sys.stdout.write(answer(node, where.get(node, ())) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
