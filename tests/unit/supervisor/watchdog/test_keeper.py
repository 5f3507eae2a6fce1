"""What the keeper of a job writes is what the record's vocabulary says."""

from __future__ import annotations

import json

from kempner.run.record.events import Requeued, parse_event
from kempner.run.record.ledger import SCHEMA, parse_lines
from kempner.supervisor.watchdog.board import JobBoard, WatchdogVerdict
from kempner.supervisor.watchdog.keeper import requeued


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
