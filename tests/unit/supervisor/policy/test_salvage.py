"""Which step is salvaged, and when a salvaged one is given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kempner.checkpoint.slots.pour import Offer
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.history import RunHistory
from kempner.supervisor.policy.outcome import OUT_OF_MEMORY
from kempner.supervisor.policy.restart import (
    decide_salvage,
    dismissed_steps,
    is_salvageable,
    salvage_patience,
    useless_salvage,
    why_not_kept,
)


def of(rank: int, *steps: int, world: int = 2, plan: int = 9, shared: int = 4) -> list[Offer]:
    return [Offer(rank, world, step, plan, shared) for step in steps]


@pytest.mark.parametrize(
    ("offers", "committed", "dismissed", "step"),
    [
        ([*of(0, 6, 7), *of(1, 6, 7)], 5, (), 7),
        ([*of(0, 6, 7), *of(1, 6)], 5, (), 6),  # one died while it copied step 7
        ([*of(0, 6, 7), *of(1, 6, 7)], None, (), 7),
        ([*of(0, 6, 7), *of(1, 6, 7)], 7, (), None),
        ([*of(0, 6, 7), *of(1, 6, 7)], 9, (), None),  # behind a checkpoint
        ([*of(0, 6, 7), *of(1, 4, 5)], 5, (), None),  # no step in common
        (of(0, 6, 7), 5, (), None),  # a node is lost
        (of(0, 6, 7, world=1), 5, (), 7),
        ([*of(0, 7), *of(1, 7, plan=8)], 5, (), None),
        ([*of(0, 7), *of(1, 7, shared=5)], 5, (), None),
        ([*of(0, 6, 7), *of(1, 6, 7, shared=5)], 5, (), None),
        ([*of(0, 7), *of(1, 7)], 5, (7,), None),
        ([], 5, (), None),
    ],
)
def test_the_newest_step_that_all_ranks_hold_alike(
    offers: list[Offer], committed: int | None, dismissed: Sequence[int], step: int | None
) -> None:
    decision = decide_salvage(offers, committed, dismissed)
    assert decision.step == step
    assert decision.reason


def line(attempt: int, event: str, **fields: Any) -> dict[str, Any]:
    return {"event": event, "attempt": attempt, "time": float(attempt), **fields}


def corrupted(attempt: int) -> dict[str, Any]:
    found = {"part": "update", "ranks": [1], "nodes": ["n1"], "sure": True, "to": 4, "reason": "-"}
    return line(attempt, "corruption_found", step=9, **found)


@pytest.mark.parametrize(
    ("code", "found_in", "salvageable"),
    [
        (ExitCode.CRASHED, [], True),
        (ExitCode.CRASHED, [2], False),
        (ExitCode.PEERS_LOST, [1, 2], False),
        (ExitCode.CRASHED, [1], True),  # the next attempt has begun at a certified step
        (ExitCode.DIVERGED, [], False),
    ],
)
def test_steps_of_an_attempt_with_wrong_bits_are_not_salvaged(
    code: ExitCode, found_in: Sequence[int], salvageable: bool
) -> None:
    history = RunHistory(map(corrupted, found_in))
    assert is_salvageable(code, history, attempt=2) is salvageable


COMMITTED = line(1, "checkpoint_committed", step=20)
SALVAGED = [
    line(1, "checkpoint_committed", step=27),
    line(1, "step_salvaged", step=27, saved=7, bytes=1, seconds=0.1),
]
RESUMED = line(2, "resumed", step=27)


@pytest.mark.parametrize(
    ("since", "attempt", "step"),
    [
        ([RESUMED], 2, 27),
        ([], 1, None),  # its own steps
        ([], 2, None),  # it died before it had loaded anything
        ([RESUMED, line(2, "checkpoint_committed", step=28)], 2, None),
        ([line(2, "resumed", step=20)], 2, None),  # the salvaged one was damaged, say
        (
            [RESUMED, line(2, "salvage_dismissed", step=27, back_to=20, kept_as="x")],
            2,
            None,
        ),
        ([RESUMED, line(3, "resumed", step=27)], 3, 27),
    ],
)
def test_a_salvaged_step_gets_one_chance(
    since: list[dict[str, Any]], attempt: int, step: int | None
) -> None:
    history = RunHistory([COMMITTED, *SALVAGED, *since])
    assert useless_salvage(history, attempt, reached=28) == step
    assert useless_salvage(history, attempt, reached=29) is None  # step 28 was made, and is lost


def test_what_was_dismissed_is_remembered() -> None:
    told = line(2, "salvage_dismissed", step=27, back_to=20, kept_as="x")
    assert dismissed_steps(RunHistory([COMMITTED, *SALVAGED, told])) == [27]
    assert useless_salvage(RunHistory([COMMITTED]), 1, 21) is None


def test_after_an_out_of_memory_kill_no_steps_are_kept() -> None:
    """Until the job starts again: a supervisor minds the kills since it began."""
    killed = f"rank 1 was killed by SIGKILL: {OUT_OF_MEMORY} (oom_kill of /job)"
    ends = [("rank 0 exited with code 1", 1), (killed, 2)]
    history = RunHistory(
        [line(n, "attempt_ended", code=1, reason=why, culprit=1, exits={}) for why, n in ends]
    )
    assert why_not_kept(True, history, since=1.5) is not None
    assert why_not_kept(False, history, since=1.5) is None
    assert why_not_kept(True, history, since=2.5) is None
    assert why_not_kept(True, RunHistory(), since=0.0) is None


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ([], 20.0),
        ([line(1, "attempt_started", ranks=2)], 99.0),
        ([line(1, "attempt_started", ranks=2), line(2, "attempt_started", ranks=2)], 98.0),
        ([{**COMMITTED, "attempt": 2, "time": 60.0}], 40.0),
        ([{**COMMITTED, "attempt": 2, "time": 95.0}], 20.0),  # a hiccup is waited for
    ],
)
def test_a_salvage_holds_up_a_restart_no_longer_than_it_is_worth(
    events: list[dict[str, Any]], seconds: float
) -> None:
    attempt = events[-1]["attempt"] if events else 1
    assert salvage_patience(RunHistory(events), attempt, now=100.0, patience=600.0) == seconds
    assert salvage_patience(RunHistory(events), attempt, now=100.0, patience=7.0) == 7.0
