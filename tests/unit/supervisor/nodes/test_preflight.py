"""Which nodes are blamed for a failure, so that the job goes on without them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kempner.config.sections import Config
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events import AttemptFailed, LedgerEvent, NodeSuspected
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import blame_environment
from kempner.supervisor.preflight import nodes_to_exclude


@dataclass
class Nodes:
    """Those of a launcher, as far as it is asked: it can do without all that are not `used`."""

    all: Sequence[str]
    used: Sequence[str]

    def unavoidable(self, suspects: Collection[str]) -> Sequence[str]:
        return [node for node in self.used if node in suspects]


BROKEN = NodeSuspected("node2", "computes wrong")
ALSO = NodeSuspected("node3", "clock is off")
FIRST = AttemptFailed(step=7, committed=None, raised="", node="node2")
HABIT = "its ranks failed first in attempts 1 and 2"
BOTH, ONE = ("node1", "node2"), ("node2",)


@pytest.mark.parametrize(
    ("events", "nodes", "used", "code", "last", "found"),
    [
        ([], BOTH, BOTH, ExitCode.CRASHED, True, {}),
        ([BROKEN], BOTH, BOTH, ExitCode.CRASHED, False, {"node2": "computes wrong"}),
        ([BROKEN], ONE, ONE, ExitCode.HUNG, False, {"node2": "computes wrong"}),
        ([BROKEN], BOTH, ["node1"], ExitCode.CRASHED, False, {}),  # a spare one replaces it
        ([ALSO], [*BOTH, "node3"], [*BOTH, "node3"], ExitCode.CRASHED, True, {}),  # it was another
        ([FIRST, FIRST], BOTH, BOTH, ExitCode.CRASHED, False, {}),
        ([FIRST, FIRST], BOTH, BOTH, ExitCode.CRASHED, True, {"node2": HABIT}),
        ([FIRST, FIRST], ONE, ONE, ExitCode.CRASHED, True, {}),
        ([FIRST, FIRST], BOTH, BOTH, ExitCode.CHECKPOINT_FAILED, True, {}),
        ([ALSO], [*BOTH, "node3"], [*BOTH, "node3"], ExitCode.CHECKPOINT_FAILED, False,
         {"node3": "clock is off"}),
        ([ALSO], [*BOTH, "node3"], [*BOTH, "node3"], ExitCode.USAGE, False,
         {"node3": "clock is off"}),
    ],
)  # fmt: skip
def test_who_is_blamed_for_a_failure_on_node2(
    tmp_path: Path,
    events: list[LedgerEvent],
    nodes: Sequence[str],
    used: Sequence[str],
    code: ExitCode,
    last: bool,
    found: dict[str, str],
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    for attempt, event in enumerate(events, 1):
        Ledger(run.ledger).record(event, attempt)
    launcher: Any = SimpleNamespace(nodes=Nodes(nodes, used))
    worked = code is ExitCode.USAGE  # before, or nothing would be started again
    decision = blame_environment(Decision(code, "so"), worked)
    assert (
        nodes_to_exclude(launcher, "node2", RunHistory.read(run.ledger), Config(), decision, last)
        == found
    )


@pytest.mark.parametrize(
    ("code", "node", "found"),
    [
        (ExitCode.HUNG, "", {"node3": "clock is off"}),  # the ranks never met
        (ExitCode.HUNG, "node2", {}),
        (ExitCode.CRASHED, "", {}),
    ],
)
def test_of_a_hang_that_no_rank_began_a_suspect_node_is_the_cause(
    tmp_path: Path, code: ExitCode, node: str, found: dict[str, str]
) -> None:
    Ledger(tmp_path / "ledger.jsonl").record(ALSO, 1)
    launcher: Any = SimpleNamespace(nodes=Nodes(BOTH, [*BOTH, "node3"]))
    history = RunHistory.read(tmp_path / "ledger.jsonl")
    decision = Decision(code, "so")
    assert nodes_to_exclude(launcher, node, history, Config(), decision, False) == found
