"""What the keeper of a job writes is what the record's vocabulary says; when its watchdog rests."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace

import pytest

from kempner.cluster.slurm.command import SlurmRefusedError
from kempner.cluster.slurm.job import job_fields, parse_job
from kempner.cluster.slurm.scontrol import SlurmAccess
from kempner.run.record.events import Requeued, parse_event
from kempner.run.record.ledger import SCHEMA, parse_lines
from kempner.supervisor.watchdog.board import JobBoard, SupervisorStage, WatchdogVerdict
from kempner.supervisor.watchdog.keeper import requeued
from kempner.supervisor.watchdog.watch import (
    MAX_FRUITLESS,
    MAX_KILLED_STARTS,
    JobLaunch,
    Sight,
    Watchdog,
    WatchMeans,
    decide_for_supervisor,
)

RUNNING = parse_job(job_fields("JobId=7 JobState=RUNNING Restarts=2 Requeue=1\n"))


def test_its_line_in_the_ledger_is_the_supervisors() -> None:
    board = JobBoard()
    board.tell_attempt(3, 0, "/runs/\udcff/ledger.jsonl")
    board.tell_step(30, new=True)
    board.tell_verdict(WatchdogVerdict.REQUEUED, "why, in words")
    environ = {
        "SLURM_JOB_ID": "8",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }
    (line,) = parse_lines(json.dumps(requeued(board, environ, 1.0)).encode())
    assert (line["schema"], line["attempt"], line["event"]) == (SCHEMA, 3, Requeued.name)
    event = parse_event(line["event"], line)
    assert event == Requeued(30, "7_2", 1, "node[1-2]", "why, in words")
    assert board.ledger == "/runs/\udcff/ledger.jsonl"


def test_its_line_tells_of_a_supervisor_that_was_killed_as_it_started() -> None:
    board = JobBoard()
    board.tell_launch(2, 30, "ledger.jsonl")
    board.tell_verdict(WatchdogVerdict.REQUEUED, "why")
    line = requeued(board, {"SLURM_JOB_ID": "7"}, 1.0)
    assert parse_event(line["event"], line) == Requeued(30, "7", 0, None, "why", starting=True)
    assert (board.ledger, board.fruitless) == ("ledger.jsonl", 2)


@pytest.mark.parametrize(
    ("stage", "most", "words"),
    [
        (SupervisorStage.STARTING, MAX_KILLED_STARTS, "killed in 11 starts in a row"),
        (SupervisorStage.FOLLOWS, MAX_FRUITLESS, "came back 3 times without a new step"),
    ],
)
def test_a_job_is_not_put_back_without_end(stage: SupervisorStage, most: int, words: str) -> None:
    killed = Sight(stage, signal.SIGKILL, math.inf, 15.0, fruitless=most, ranks=False)
    decision = decide_for_supervisor(killed, 2, RUNNING)
    assert not decision.requeue
    assert words in decision.reason
    assert decide_for_supervisor(replace(killed, fruitless=most - 1), 2, RUNNING).requeue


def test_ranks_that_cannot_be_asked_to_stop_any_more_are_looked_for_again() -> None:
    """A rank that left has put the job back, and Slurm, which ends it, passes on no signal."""
    board, left = JobBoard(), [False, True]
    board.tell_attempt(3, 0, "ledger.jsonl")
    board.tell_status(signal.SIGKILL)

    def refuse(job: str) -> None:
        raise SlurmRefusedError("scancel", "Invalid job id specified")

    access = SlurmAccess(look=lambda job: replace(RUNNING, state="COMPLETING", restarts=3))
    means = WatchMeans(access, lambda job: left.pop(), stop_ranks=refuse, pause=lambda _: None)
    Watchdog(board, JobLaunch("7", "7", 2), means).follow()
    assert (left, board.verdict) == ([], WatchdogVerdict.LEFT)
