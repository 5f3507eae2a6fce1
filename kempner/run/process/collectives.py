"""The collectives that a thread of this process has begun and not ended, by c10d's flight recorder.

The recorder (torch/csrc/distributed/c10d/FlightRecorder.hpp) numbers the collectives of each
process group as they begin, on Gloo and on NCCL, and is on by default. It is read only while a rank
stands still in a collective, without its stacks, which take seconds. This module does not import
torch: a process without torch has no collectives.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kempner.run.output.logs import logger

MOST = 4
"""Most collectives reported; few programs begin more before they wait for one."""

MOST_GROUPS = 64
"""Most process groups of a rank reported."""


@dataclass(frozen=True)
class CollectiveCall:
    """The `number`th collective of a process group. `members` are the ranks of the group as (first,
    count, step), which suits the groups of any device mesh."""

    group: str
    members: tuple[int, int, int]
    number: int
    operation: str

    @property
    def ranks(self) -> range:
        first, count, step = self.members
        return range(first, first + count * step, step)


@dataclass(frozen=True)
class CollectivesUnderWay:
    """The collectives that a rank has begun and not ended, oldest first; `begun` is the number of
    the last one begun in each of its groups."""

    under_way: tuple[CollectiveCall, ...] = ()
    begun: Mapping[str, int] = field(default_factory=dict)


NONE_UNDER_WAY = CollectivesUnderWay()
"""Shared by most reports, of which thousands may come each second."""


def collectives_under_way(thread: int | None) -> CollectivesUnderWay:
    """The collectives of a thread (`threading.get_ident`), or of all; empty if unknown. Both the
    recorder and the list of groups are private to torch: another version of them must not break the
    rank's link."""
    try:
        return _look(thread)
    except Exception as error:  # noqa: BLE001 - it only tells
        logger().debug("the collectives under way cannot be read", reason=repr(error))
        return CollectivesUnderWay()


def flight_record() -> bytes:
    """The recorder's content in torch's own format; empty without a recorder."""
    recorder = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(recorder, "_dump_fr_trace", None)
    try:
        return b"" if dump is None else bytes(dump(True, False, False))
    except Exception as error:  # noqa: BLE001 - as above
        logger().debug("the flight recorder cannot be read", reason=repr(error))
        return b""


def _look(thread: int | None) -> CollectivesUnderWay:
    recorder = sys.modules.get("torch._C._distributed_c10d")
    torchs = sys.modules.get("torch.distributed.distributed_c10d")
    dump, world = getattr(recorder, "_dump_fr_trace", None), getattr(torchs, "_world", None)
    if dump is None or world is None:
        return CollectivesUnderWay()
    trace = pickle.loads(dump(True, False, True))  # made by this process
    groups = {
        name: members
        for group, name in list(world.pg_names.items())
        if (members := as_range(sorted(world.pg_group_ranks.get(group, ())))) is not None
    }
    return read_trace(trace, groups, thread)


def read_trace(
    trace: Mapping[str, Any], groups: Mapping[str, tuple[int, int, int]], thread: int | None
) -> CollectivesUnderWay:
    """Read a trace of the recorder, format version 2."""
    entries: list[dict[str, Any]] = trace.get("entries", [])
    begun: dict[str, int] = {}
    for entry in entries:
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        begun[name] = max(begun.get(name, 0), number)
    under_way = [
        CollectiveCall(
            entry["process_group"][0],
            groups[entry["process_group"][0]],
            entry["collective_seq_id"],
            entry["profiling_name"].partition(":")[2],
        )
        for entry in entries
        if not (entry["retired"] or entry["is_p2p"])
        and (thread is None or entry["thread_id"] == str(thread))
        and entry["process_group"][0] in groups
    ]
    return CollectivesUnderWay(tuple(under_way[:MOST]), _last(begun))


def _last(begun: Mapping[str, int]) -> dict[str, int]:
    return dict(list(begun.items())[-MOST_GROUPS:])


def as_range(ranks: Sequence[int]) -> tuple[int, int, int] | None:
    """Ranks in ascending order as (first, count, step); None if their distances differ."""
    if not ranks:
        return None
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    expected = range(ranks[0], ranks[0] + len(ranks) * step, step)
    return (ranks[0], len(ranks), step) if list(expected) == list(ranks) else None
