"""The clock of the machine is set by an hour while a run goes on: no patience is used up by that,
and none is given twice."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import ROOT

from kempner.config.resilience import ResilienceSection
from kempner.run.process.threads import steady_time
from kempner.run.record.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    NodeSuspected,
    RankReady,
    Restarting,
)
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger, read_lines
from kempner.supervisor.nodes.changes import UNMEASURED_RESTART, restart_seconds
from kempner.supervisor.nodes.exclusion import known_suspects
from kempner.supervisor.policy.restart import SHORTEST_SALVAGE, salvage_patience

HOUR = 3600.0

Set = Callable[[float], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Shifts the time of day by a number of seconds, as NTP does."""
    true = time.time
    return lambda by: monkeypatch.setattr(time, "time", lambda: true() + by)


@pytest.fixture(params=[HOUR, -HOUR], ids=["forward", "back"])
def step(request: pytest.FixtureRequest) -> float:
    return float(request.param)


def test_neither_a_salvage_nor_a_suspicion_nor_a_restart_is_mistaken(
    tmp_path: Path, set_clock: Set, step: float
) -> None:
    supervisor, rank = (Ledger(tmp_path / "ledger.jsonl") for _ in range(2))
    rank.record(NodeSuspected("node1", "in the launch before"), 1)
    history, section = RunHistory.of(supervisor), ResilienceSection(suspect_for=HOUR / 2)
    supervisor.record(AttemptStarted(1), 2)
    supervisor.record(NodeSuspected("node2", "no memory"), 2)
    supervisor.record(AttemptEnded(1, "", 0, {}), 2)
    supervisor.record(Restarting(""), 2)
    set_clock(step)
    assert salvage_patience(history, 2, steady_time(), 2 * HOUR) == SHORTEST_SALVAGE
    rank.record(CheckpointCommitted(7), 2)  # by another process, whose clock is set, too
    rank.record(RankReady(7, "cpu", {}), 3)
    history.refresh()
    assert salvage_patience(history, 2, steady_time(), 2 * HOUR) == SHORTEST_SALVAGE
    assert set(known_suspects(history, section)) == {"node1", "node2"}
    assert abs(restart_seconds(history)) < UNMEASURED_RESTART
    assert abs(read_clock(supervisor.path) - time.time()) < HOUR / 60


def read_clock(path: Path) -> float:
    """The time of day of the last line: what people read is by the clock as it is."""
    return float([*read_lines(path)][-1]["time"])


def test_what_was_written_before_it_began_a_supervisor_takes_by_the_time_of_day(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record(AttemptStarted(1), 1)
    written = read_clock(ledger.path)
    assert [e.time for e in RunHistory.of(ledger).entries(AttemptStarted)] == [written]
    assert [e.time for e in RunHistory.read(ledger.path).entries(AttemptStarted)] == [written]


TIME_OF_DAY = {
    "kempner/supervisor/slurm/job_monitor.py": "until the controller says what time it is",
    "kempner/supervisor/context.py": "clocks of machines are compared",
    "kempner/supervisor/preflight.py": "clocks of machines are compared",
    "kempner/probe/node.py": "clocks of machines are compared",
    "kempner/supervisor/recovery.py": "the manifest of a checkpoint says when it was made",
    "kempner/supervisor/watchdog/keeper.py": "a line of the ledger",
    "kempner/run/record/ledger.py": "a line of the ledger",
    "kempner/run/process/threads.py": "the time of day with which the process begins",
    "kempner/checkpoint/convert/first_commit.py": "a manifest",
    "kempner/checkpoint/convert/import_dcp.py": "a manifest",
    "kempner/checkpoint/convert/import_safetensors.py": "a manifest",
    "kempner/checkpoint/tensors/save.py": "a manifest",
    "kempner/training/observe/metrics.py": "a line of the metrics",
    "kempner/integrations/transformers_trainer/loop.py": "a manifest, and transformers",
    "kempner/cluster/machine.py": "when a process began, for the ledger",
}
"""Where the time of day is asked for, apart from the commands that show it, and what for."""

SHOWS = ("cli", "insight", "jobs", "lab", "project", "rehearse")


def test_no_patience_is_measured_by_the_time_of_day() -> None:
    asks = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "kempner").rglob("*.py")
        if path.relative_to(ROOT).parts[1] not in SHOWS and _asks(ast.parse(path.read_text()))
    }
    assert asks == TIME_OF_DAY.keys()


def _asks(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "time.time"
        for node in ast.walk(tree)
    )
