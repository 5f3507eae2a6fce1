"""Whether a rank that was killed fell to the kernel, because memory ran out."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kempner.cluster.machine.cgroup import MemoryGroup
from kempner.run.control.protocol import Usage
from kempner.supervisor.control.events import Connected
from kempner.supervisor.monitors.memory import explain_kill
from kempner.supervisor.monitors.process_probe import is_here
from kempner.supervisor.policy.outcome import RankExit


def explained(
    end: RankExit, usage: Mapping[int, Usage], joined: Mapping[int, Connected]
) -> RankExit:
    """`end`, with the reason and the numbers if it was an out-of-memory kill.

    The count of such kills comes from its node's agent, from the control group where that is on
    this host, or else from the ranks that lived on beside it: they measure once more when they lose
    a peer.
    """
    last, there = usage.get(end.rank), joined.get(end.rank)
    by_force = end.status in (-signal.SIGKILL, None) and not end.ended_by_us
    if last is None or there is None or not by_force:
        return end
    beside = [rank for rank, other in joined.items() if other.host == there.host and rank in usage]
    counts = [end.oom_kills, *(usage[rank].memory.oom_kills for rank in beside)]
    if is_here(there.host) and last.memory.group:
        with suppress(OSError):  # gone with its last process: what others have seen must do
            counts.append(MemoryGroup(Path(last.memory.group)).oom_kills())
    reason = explain_kill(last, max(counts))
    return replace(end, sentence=reason) if reason else end
