"""A stop signal may come at any moment, to any process, and any number of times."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
from harness import Run
from submitting import LONG, Project, assert_like

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(500)


class Moments:
    """Holds rank 1 still in a phase of our choosing, for a warning to arrive in it."""

    def __init__(self, project: Project, job: str) -> None:
        self.project, self.run, self.job = project, project.run, job

    def importing(self, attempt: int) -> bool:
        """It has called its supervisor, and imports torch for some seconds more."""
        log = self.run.record.supervisor_log(attempt)
        return log.exists() and any(
            (line["event"], line.get("rank")) == ("rank connected", 1) for line in read_lines(log)
        )

    def loading(self, attempt: int) -> bool:
        """It has found the others, and builds and loads."""
        return self.run.record.log(attempt, 1).exists()

    def saving(self, attempt: int) -> bool:
        """A checkpoint is begun and cannot be committed without it."""
        return self.run.attempt() == attempt and any(self.run.checkpoints.glob(".step-*"))

    def evaluating(self, attempt: int) -> bool:
        """The supervisor has heard that it evaluates."""
        return '"eval"' in _text(self.run.record.ranks(attempt))

    def warned_while(self, moment: str, attempt: int) -> None:
        """Warn the job while rank 1 is held in this moment."""
        held = self.project.held("node2", partial(getattr(self, moment), attempt))
        self.project.wait_until(self.job, held, f"rank 1 {moment}")
        self.project.warn(self.job)
        asked = lambda: [  # noqa: E731
            e for e in self.project.events("stop_requested") if e["attempt"] == attempt
        ]
        self.project.wait_until(self.job, asked, "a warned supervisor")
        self.project.signal_ranks("node2", signal.SIGCONT)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "[]"


def test_a_warning_in_any_phase_and_signals_to_some_or_all(
    project: Project, undisturbed: Run, corpus: Path
) -> None:
    project.slow()
    evaluate = (f"--eval.dataset_path={corpus}", "--eval.interval=25")
    job = project.train(*LONG, *evaluate)
    moments = Moments(project, job)
    for attempt, moment in enumerate(("importing", "loading", "saving", "evaluating"), start=1):
        project.attempt(job, attempt)
        moments.warned_while(moment, attempt)

    project.attempt(job, 5)
    project.reach(job, project.run.latest() + 2)
    project.signal_ranks("node2", signal.SIGTERM)

    project.attempt(job, 6)
    project.reach(job, project.run.latest() + 2)
    for _ in range(3):
        project.cluster.run("login1", "scancel", "--signal=TERM", job, check=False)

    project.attempt(job, 7)
    project.hurry()
    project.end(job)
    project.assert_states(job, *["REQUEUED"] * 6, "COMPLETED")
    ended = [
        json.dumps(event["exits"], sort_keys=True) for event in project.events("attempt_ended")
    ]
    assert ended == ['{"0": 75, "1": 75}'] * 6 + ['{"0": 0, "1": 0}']
    assert all(event["lost_steps"] == 0 for event in project.events("stopped"))
    assert_like(project.run, undisturbed)
