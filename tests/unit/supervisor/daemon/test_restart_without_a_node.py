"""A restart that no node of the job could make any better goes by way of the queue."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from following import Hands, feed, follow

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmSilentError
from kempner.cluster.slurm.job import JobState, parse_job
from kempner.config.sections import Config
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events.job import NodeSuspected
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.supervisor.policy.outcome import RankExit, decide_outcome
from kempner.supervisor.policy.restart import Failure
from kempner.supervisor.recovery import restart_or_finish
from kempner.supervisor.slurm.job_monitor import JobMonitor

RUNNING = parse_job({"JobId": "7", "JobState": "RUNNING", "Requeue": "1", "BatchFlag": "1"})
TRAINED = Failure(step=31, committed=30)
NO_NETWORK = "the nodes would not all use the same network"


@pytest.mark.parametrize("answers", [1, 2])
def test_also_where_ranks_fail_before_slurm_has_said_anything_in_their_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    """It has then said so in an earlier one, or is asked."""
    asked: list[str] = []

    def job_state(job: str, within: float = 0.0) -> JobState:
        asked.append(job)
        if len(asked) != answers:
            raise SlurmSilentError("no answer")
        return RUNNING

    monkeypatch.setattr(scontrol, "job_state", job_state)
    job, hands = JobMonitor("7", batch=True), Hands()
    if answers == 1:
        job.state(within=0.0)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record(NodeSuspected("node2", "it has no interface on the network of the others"), 4)
    follower = follow(hands, 2, Config(), ledger, job)
    feed(follower, RankExit(1, int(ExitCode.USAGE), sentence=NO_NETWORK))
    assert follower.job.at_first is None
    decision = decide_outcome(follower.ends)
    end = restart_or_finish(_context(tmp_path, ledger, job), follower, decision, [TRAINED])
    assert end is not None
    assert end.bad_nodes == ("node2",)


def _context(folder: Path, ledger: Ledger, job: JobMonitor) -> Any:
    launcher = SimpleNamespace(
        nodes=("node1", "node2"),
        joined={},
        unavoidable=lambda suspects: [n for n in ("node1", "node2") if n in suspects],
        prepare_again=lambda lost, stuck: None,
    )
    return SimpleNamespace(
        config=Config(),
        history=RunHistory.read(folder / "ledger.jsonl"),
        job=job,
        launcher=launcher,
        ledger=ledger,
        lease=SimpleNamespace(lost=False, check=lambda: None),
        signals=SimpleNamespace(received=[]),
    )
