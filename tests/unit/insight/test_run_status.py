"""Where a run stands, in few words."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.insight.status import gather, read_status, summarise
from kempner.run.control.protocol import Phase, Report
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.events import LastReport
from kempner.supervisor.control.rank_status import RankStatusFile


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({}, ()),
        ({3: (7, "step")}, (("rank 3", "step 7, step"),)),
        (
            {r: (7, "save" if r == 2 else "step") for r in (0, 1, 2, 3, 5)},
            (("rank 2", "step 7, save"), ("ranks 0-1, 3, 5", "step 7, step")),
        ),
        (dict.fromkeys(range(16384), (9, "exit")), (("ranks 0-16383", "step 9, exit"),)),
    ],
)
def test_ranks_in_the_same_place_are_named_together(
    places: dict[int, tuple[int, str]], expected: tuple[tuple[str, str], ...]
) -> None:
    ranks = [{"rank": r, "step": step, "phase": phase} for r, (step, phase) in places.items()]
    assert gather(ranks) == expected
    assert gather(reversed(ranks)) == expected


def test_what_the_supervisor_heard_is_what_the_status_says(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert read_status(run).ranks == ()
    attempt = begin_attempt(run)
    assert read_status(run).ranks == ()
    seen = {rank: LastReport(Report(12, Phase.EVAL, 1.0, 2.0), at=0.0) for rank in (1, 0)}
    RankStatusFile(run.ranks(attempt.number)).update(seen)
    assert read_status(run).ranks == (("ranks 0-1", "step 12, eval"),)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "not started"),
        ([("attempt_started", "")], "running, or ended without a word"),
        ([("stop_requested", "time_limit")], "asked to stop (time limit)"),
        ([("stop_requested", "signal"), ("stopped", "cancel")], "stopped (cancel)"),
        ([("stopped", "SIGNAL")], "stopped"),
        ([("stopped", "signal"), ("attempt_ended", "stopped (preemption)")],
         "stopped (preemption)"),
    ],
)  # fmt: skip
def test_the_state_names_the_reason_of_a_stop(events: list[tuple[str, str]], state: str) -> None:
    lines = [{"event": event, "reason": reason} for event, reason in events]
    assert summarise(lines, [], None).state == state
