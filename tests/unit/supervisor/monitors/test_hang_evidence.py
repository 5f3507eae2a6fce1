"""What is taken as evidence of a hang, and what it is taken for."""

from __future__ import annotations

import errno
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from harness import wait_until
from patience import scaled

from kempner.cluster.network.tcp_stalls import stalled_connections, unanswered_calls
from kempner.probe import processes
from kempner.probe.processes import describe_process
from kempner.run.control.protocol import Connected, DumpStacks, FromSupervisor, Phase, Report
from kempner.run.record.events import ConnectionsStalled, HangFound, NodeSuspected
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.supervisor.control.program_reports import LastReport
from kempner.supervisor.monitors.base import Hang, Snapshot
from kempner.supervisor.monitors.hangs import (
    EVIDENCE,
    HangEvidence,
    ProcessLook,
    by_what_they_wait_for,
    cut_off_from_others,
    processes_to_look_at,
    silent_node,
)

HERE = platform.node()


def seen(at: float, waiting: str = "") -> LastReport:
    return LastReport(Report(7, Phase.STEP, 0.0, 0.0, waiting), at)


def test_a_stopped_process_is_seen_from_outside() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: "State: T (stopped)" in describe_process(child.pid), "it is stopped")
        (here,) = ProcessLook({HERE: [child.pid]}, lambda *_: []).lines
        assert "State: T (stopped)" in here
        probe = [sys.executable, "-m", processes.__name__]
        assert "T (stopped)" in subprocess.check_output([*probe, str(child.pid)], text=True)
    finally:
        child.kill()
        child.communicate()
    assert "cannot be looked at" in describe_process(child.pid)


def test_the_kill_waits_for_ranks_and_for_nodes_that_have_not_answered(
    tmp_path: Path,
) -> None:
    go_on = threading.Event()

    def look(node: str, pids: Sequence[int]) -> list[str]:
        assert (node, pids, go_on.wait(scaled(60))) == ("elsewhere", [10], True)
        return []

    told: list[FromSupervisor] = []
    evidence = HangEvidence(1, told.append, Ledger(tmp_path / "ledger.jsonl"), look)
    joined = {0: Connected(0, "elsewhere", 10)}
    snapshot = Snapshot.of(60.0, 1, {}, 100.0, {}, joined=joined)
    later = replace(snapshot, now=60.1 + EVIDENCE)
    assert not evidence.complete(later)
    evidence.collect(Hang("", 0, Phase.STEP, 60.0), snapshot)
    assert told == [DumpStacks()]
    assert not evidence.complete(later)
    go_on.set()
    wait_until(lambda: evidence.complete(later), "the node has answered")
    assert not evidence.complete(snapshot)
    evidence.close(replace(snapshot, now=63.5))
    (told_of,) = RunHistory.read(tmp_path / "ledger.jsonl").events(HangFound)
    assert told_of.evidence_seconds == 3.5
    assert told_of.seconds == 63.5  # it was still for 60 s when it was found


def test_whom_to_look_at() -> None:
    joined = {0: Connected(0, HERE, 10), 1: Connected(1, "b", 11), 2: Connected(2, "b", 12)}
    joined |= {3: Connected(3, "c", 13), 4: Connected(4, "d", 14)}
    last_reports = {0: seen(99.0), 1: seen(99.0), 2: seen(80.0), 3: seen(99.0)}
    snapshot = Snapshot.of(60.0, 5, last_reports, 100.0, {}, joined=joined)
    found = processes_to_look_at(Hang("", 3, Phase.STEP, 60.0), snapshot)
    assert found == {HERE: [10], "b": [12], "c": [13], "d": [14]}
    found = processes_to_look_at(Hang("", None, Phase.STEP, 60.0), snapshot)
    assert found == {HERE: [10], "b": [11, 12], "c": [13], "d": [14]}


def test_who_waits_for_what() -> None:
    told = by_what_they_wait_for(
        {1: seen(0, "the vote").report, 0: seen(0, "the vote").report, 2: seen(0).report}
    )
    assert told == {"the vote": [0, 1], "nothing": [2]}


A, B, C = "10.10.0.11", "10.10.0.12", "10.10.0.13"


HOSTS = {0: "a", 1: "b", 2: "c", 3: "a"}


@pytest.mark.parametrize(
    ("stalled", "silent", "cut_off"),
    [
        ({}, None, None),
        ({}, "b", None),  # a stopped rank, say
        ({0: [(A, B)]}, None, None),  # of two ends, either may be the one
        ({0: [(A, B)]}, "b", 1),  # one of them reports
        ({0: [(A, B)], 1: [(B, A)]}, None, None),
        ({0: [(A, B)], 1: [(B, A)]}, "c", None),
        ({0: [(A, B)], 1: [(B, C), (B, A)], 2: [(C, B)]}, None, 1),
        ({0: [(A, B)], 1: [(B, C), (B, A)], 2: [(C, B)]}, "b", 1),
        ({0: [(A, B)], 1: [(B, C)]}, None, 1),
        ({0: [(A, C)], 1: [(B, C)]}, "c", 2),
        ({0: [(A, C)], 1: [(B, C)]}, None, None),
        ({1: [(B, C), (B, A)]}, None, 1),
        ({0: [(A, B), (A, C)], 1: [(B, C)]}, None, None),  # everything is broken
        ({0: [(A, B), (A, C)], 1: [(B, C)]}, "c", None),
        ({3: [(A, B)], 1: [(B, C)], 2: [(B, C)]}, None, 1),  # ranks of one node see the same
        ({0: [(A, C)], 3: [(A, C)]}, "c", 2),
    ],
)
def test_the_node_that_every_stalled_connection_has_in_common(
    stalled: dict[int, list[tuple[str, str]]], silent: str | None, cut_off: int | None
) -> None:
    assert cut_off_from_others(stalled, HOSTS, silent) == cut_off


def test_the_only_node_that_nothing_is_heard_of() -> None:
    joined = {rank: Connected(rank, "ab"[rank // 2], rank) for rank in range(4)}
    joined[4] = Connected(4, "c", 4)

    def of(*silent: int) -> str | None:
        last = {rank: seen(80.0 if rank in silent else 99.0) for rank in joined}
        return silent_node(Snapshot.of(60.0, 5, last, 100.0, {}, joined=joined))

    assert [of(), of(2, 3), of(3), of(4), of(2, 3, 4)] == [None, "b", None, "c", None]


@pytest.mark.parametrize(("laggard", "named"), [(None, 2), (2, 2), (3, 3), (1, None)])
def test_a_node_that_is_cut_off_is_suspect_whichever_of_its_ranks_is_behind(
    tmp_path: Path, laggard: int | None, named: int | None
) -> None:
    joined = {rank: Connected(rank, "ab"[rank // 2], rank) for rank in range(4)}
    last = {rank: seen(99.0 if rank < 2 else 80.0) for rank in joined}
    snapshot = Snapshot.of(60.0, 4, last, 100.0, {}, joined=joined)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    evidence = HangEvidence(1, lambda _: None, ledger, lambda *_: [])
    evidence.collect(Hang("It hangs", laggard, Phase.STEP, 60.0), snapshot)
    evidence.hear(0, ConnectionsStalled(((A, B),)))
    evidence.close(snapshot)
    history = RunHistory.read(tmp_path / "ledger.jsonl")
    assert [e.node for e in history.events(NodeSuspected)] == ["b"] * (named is not None)
    (told,) = history.events(HangFound)
    assert told.laggard == (laggard if named is None else named)


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0B000A0A:A1B3 0C000A0A:C350 01 00000010:00000000 01:00000014 00000004     0        0 1 1
   1: 0B000A0A:A1B4 0D000A0A:C350 01 00000010:00000000 01:00000014 00000001     0        0 1 1
   2: 0100007F:A1B5 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 1 1
"""
TABLE_6 = """\
  sl  local_address                         remote_address                        st ...
   0: 0000000000000000FFFF00000B000A0A:1 0000000000000000FFFF00000C000A0A:2 01 0:0 1:1 00000002 0
"""


def test_connections_that_deliver_nothing(tmp_path: Path) -> None:
    (tmp_path / "tcp").write_text(TABLE)
    (tmp_path / "tcp6").write_text(TABLE_6)
    found = stalled_connections((tmp_path / "tcp", tmp_path / "tcp6"))
    assert found == [("10.10.0.11", "10.10.0.12")] * 2
    assert all("." in near or ":" in near for near, _ in stalled_connections())  # this machine's


def test_a_host_that_answers_is_told_from_one_that_does_not() -> None:
    """Of real connections: to a listener, to one that is gone, and to one that takes no calls."""
    near, far = "127.0.0.1", {"127.0.0.2": 9, "127.0.0.3": 9, "127.0.0.4": 1}
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server((host, 0), backlog=room))
            for host, room in far.items()
        ]
        for listener in listeners:
            call(stack, near, listener.getsockname())
        accepted = stack.enter_context(listeners[1].accept()[0])
        listeners[1].close()  # refuses from now on, but answers
        assert unanswered_calls(patience=5.0) == []
        call(stack, near, listeners[2].getsockname(), wait=False)  # no more room: it is dropped
        assert accepted.getpeername()[0] == near
        assert unanswered_calls(patience=0.5) == [(near, "127.0.0.4")]


def call(stack: ExitStack, near: str, far: tuple[str, int], wait: bool = True) -> None:
    caller = stack.enter_context(socket.socket())
    caller.bind((near, 0))
    caller.setblocking(wait)
    assert caller.connect_ex(far) in (0, errno.EINPROGRESS)
