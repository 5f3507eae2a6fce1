"""Whether a rank that was killed fell to the kernel, because memory ran out."""

from __future__ import annotations

import platform
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kempner.cluster.cgroup import MemoryGroup
from kempner.run.messages import Vitals
from kempner.supervisor.memory import explain_kill
from kempner.supervisor.news import Joined
from kempner.supervisor.policy import RankExit


def explained(
    end: RankExit, vitals: Mapping[int, Vitals], joined: Mapping[int, Joined]
) -> RankExit:
    """`end`, with the reason and the numbers if it was an out-of-memory kill.

    The count of such kills comes from the control group where that is on this host, or else from
    the ranks that lived on beside it: they measure once more when they lose a peer.
    """
    last = vitals.get(end.rank)
    if last is None or end.ended_by_us or end.status not in (-signal.SIGKILL, None):
        return end
    host = joined[end.rank].host
    counts = [v.oom_kills for rank, v in vitals.items() if joined[rank].host == host]
    if host == platform.node() and last.group:
        with suppress(OSError):  # gone with its last process: what others have seen must do
            counts.append(MemoryGroup(Path(last.group)).oom_kills())
    reason = explain_kill(last, max(counts))
    return replace(end, sentence=reason) if reason else end
