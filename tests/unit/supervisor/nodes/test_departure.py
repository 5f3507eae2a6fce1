"""Which nodes are to go, what the run does about it, and which nodes Slurm gets back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.cluster.slurm.scontrol import NodeShown, Reservation, read_node, read_reservations
from kempner.supervisor.nodes.changes import (
    SOON,
    DepartureAction,
    DepartureSituation,
    decide_departure,
    drained,
    in_maintenance,
    may_give_back,
)

LINES = {
    "22.05": "NodeName=node2 Arch=x86_64 Gres=gpu:4 NodeHostName=node2 Version=22.05.8 "
    "State=MIXED+DRAIN ThreadsPerCore=1 Partitions=low,high  BootTime=2026-11-28T02:08:49 "
    "AllocTRES=cpu=1 ExtSensorsTemp=n/s Reason=rack move soon [root@2026-11-28T02:18:34]",
    "24.11": "NodeName=node2 Arch=x86_64 NodeHostName=node2 Version=24.11.5 State=MIXED+DRAIN "
    "ResumeAfterTime=None AveWatts=0  Reason=rack move soon [root@2026-11-28T02:19:32]",
    "26.05": "NodeName=node2 NodeHostName=node2 Version=26.05.5 State=MIXED+DRAIN "
    "SuspendTime=INFINITE AveWatts=0 Reason=rack move soon [root@2026-11-28T02:20:23]",
}
PLANNED = (
    "ReservationName=mx StartTime=2026-11-28T02:23:34 EndTime=2026-11-28T03:23:34 "
    "Duration=01:00:00 Nodes=node[1,3] NodeCnt=2 CoreCnt=16 Features=(null) PartitionName=(null) "
    "Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=16 Users=root State=INACTIVE\n"
    "ReservationName=course StartTime=2026-11-28T02:23:34 EndTime=2026-11-28T03:23:34 "
    "Nodes=(null) Flags=SPEC_NODES\n"
)
START = 1795832614.0
"""02:23:34 of that day, in UTC."""


@pytest.mark.parametrize("version", LINES)
def test_a_drained_node_is_read_with_its_whole_reason(version: str) -> None:
    shown = read_node(LINES[version])
    assert shown == NodeShown("node2", "MIXED+DRAIN", "rack move soon")
    assert drained([shown]) == {"node2": "it drains (rack move soon)"}


@pytest.mark.parametrize(
    ("state", "reason", "goes"),
    [
        ("MIXED", "", ""),
        ("ALLOCATED+CLOUD", "", ""),
        ("IDLE+PLANNED", "", ""),
        ("MIXED+NOT_RESPONDING", "", ""),  # its ranks tell more
        ("MIXED+COMPLETING", "", ""),
        ("DRAINING", "Kill task failed", "it drains (Kill task failed)"),
        ("MIXED+FAIL", "GPU ECC", "it is failing (GPU ECC)"),
        ("ALLOCATED+REBOOT_REQUESTED", "", "it is to be rebooted"),
        ("MIXED+DRAIN", "kempner: its ranks failed first", ""),
        ("MIXED+DRAIN", "Kempner's hook", ""),
        ("MIXED+DRAIN", "asked by kempner's user", "it drains (asked by kempner's user)"),
    ],
)
def test_a_node_goes_if_slurm_says_so_and_not_for_our_own_word(
    state: str, reason: str, goes: str
) -> None:
    assert drained([NodeShown("node2", state, reason)]) == ({"node2": goes} if goes else {})


def test_reservations_are_read() -> None:
    first, second = read_reservations(PLANNED)
    assert first == Reservation("mx", START, START + 3600, "node[1,3]", maintenance=True)
    assert (second.nodes, second.maintenance) == ("", False)
    assert read_reservations("No reservations in the system\n") == []


@pytest.mark.parametrize(
    ("before", "ends_in", "own", "said"),
    [
        (300.0, None, "", "its maintenance mx begins in 5 min"),
        (SOON + 1, None, "", ""),
        (300.0, 200.0, "", ""),  # the job is over by then
        (300.0, 400.0, "", "its maintenance mx begins in 5 min"),
        (300.0, None, "mx", ""),  # the job was submitted into it
        (-60.0, None, "", "its maintenance mx has begun"),
        (-3601.0, None, "", ""),
    ],
)
def test_a_maintenance_that_begins_soon_takes_its_nodes_alone(
    before: float, ends_in: float | None, own: str, said: str
) -> None:
    now = START - before
    end = None if ends_in is None else now + ends_in
    planned, nodes = read_reservations(PLANNED), ("node1", "node2")
    found = in_maintenance(planned, nodes, now, end, own, expand_hosts)
    assert found == ({"node1": said} if said else {})


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("MIXED", ""),  # though it has answered nothing: the next job would get it at once
        ("IDLE", ""),
        ("MIXED+COMPLETING", ""),
        ("MIXED+NOT_RESPONDING", "Slurm shows it as not responding"),
        ("MIXED*", "Slurm shows it as not responding"),
        ("DOWN", "Slurm shows it as not responding"),
        ("MIXED+DRAIN", "Slurm shows it as leaving"),
        ("MIXED+MAINTENANCE", "Slurm shows it as leaving"),
        ("MIXED+CLOUD+POWERING_UP", ""),
    ],
)
def test_a_node_is_given_back_only_if_slurm_itself_gives_it_to_no_other_job(
    state: str, why: str
) -> None:
    shown = [NodeShown("node2", state), NodeShown("node3", "DOWN")]
    assert may_give_back({"node2"}, shown) == ({"node2": why} if why else {})
    assert may_give_back(set(), shown) == {}


WHOLE = DepartureSituation(
    going={},
    nodes=("node1", "node2", "node3"),
    used=("node1", "node2"),
    host="node1",
    unavoidable=(),
    commits=True,
    comes_back=True,
)


@pytest.mark.parametrize(
    ("going", "changes", "departure"),
    [
        ((), {}, DepartureAction.NOTHING),
        (("node7",), {}, DepartureAction.NOTHING),  # of another job
        (("node3",), {}, DepartureAction.LEAVE_OUT),  # a spare one
        (("node3",), {"commits": False}, DepartureAction.LEAVE_OUT),
        (("node2",), {}, DepartureAction.MOVE),
        (("node2",), {"comes_back": False}, DepartureAction.MOVE),
        (("node2",), {"commits": False}, DepartureAction.NOTHING),
        (("node2",), {"unavoidable": ("node2",)}, DepartureAction.REQUEUE),
        (("node2",), {"unavoidable": ("node2",), "comes_back": False}, DepartureAction.NOTHING),
        (("node1",), {}, DepartureAction.REQUEUE),  # the supervisor goes with it
        (("node1", "node2"), {}, DepartureAction.REQUEUE),
        (("node1",), {"used": ("node2", "node3")}, DepartureAction.REQUEUE),
        (("node1",), {"comes_back": False}, DepartureAction.NOTHING),
    ],
)
def test_what_is_done_about_nodes_that_are_to_go(
    going: tuple[str, ...], changes: dict[str, object], departure: DepartureAction
) -> None:
    reasons = dict.fromkeys(going, "it drains")
    now = replace(WHOLE, going=reasons, **changes)  # type: ignore[arg-type]
    decision = decide_departure(now)
    assert decision.departure is departure
    assert decision.nodes == tuple(node for node in now.nodes if node in going)
    assert all(f"{node} is to go: it drains" in decision.reason for node in decision.nodes)
