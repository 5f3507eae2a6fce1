"""How often a job was restarted, by those who count, and which run is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.cli.insight.status_words import job_rows
from kempner.insight.status.job import JobStatus, Restarts, find_run
from kempner.insight.status.runs import find_runs
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.events import AttemptStarted
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory


@pytest.mark.parametrize(
    ("counts", "state", "agree"),
    [
        ((0, 0, 0), "RUNNING", True),
        ((2, 2, 2), "RUNNING", True),
        ((2, None, 2), "COMPLETED", True),
        ((2, 2, None), "RUNNING", True),
        ((None, 0, 0), "PENDING", True),
        ((0, 1, 1), "PENDING", True),  # the launch came before the restart that it waits for
        ((0, 1, 1), "RUNNING", False),
        ((1, 1, 1), "PENDING", False),
        ((1, 1, 0), "RUNNING", False),
    ],
)
def test_counts_that_contradict_each_other_are_told(
    counts: tuple[int | None, int | None, int | None], state: str, agree: bool
) -> None:
    said = dict(job_rows(JobStatus("7", state, "", Restarts(*counts)))).get("restarts", "")
    assert ("THEY DISAGREE" not in said) is agree


def test_the_run_of_a_job_is_the_one_whose_ledger_knows_it(tmp_path: Path) -> None:
    for name, job in (("a", "7"), ("b", "8_1"), ("c", "8_2")):
        run = RunDirectory(tmp_path / name)
        run.path.mkdir()
        Ledger(run.ledger).record(AttemptStarted(1, job, restarts=0), attempt=1)
    runs = find_runs([tmp_path])
    assert find_run("8_2", runs, within=0.0) == RunDirectory(tmp_path / "c")
    with pytest.raises(UsageError, match=r"no run below .* belongs to job 9"):
        find_run("9", runs, within=0.0)
