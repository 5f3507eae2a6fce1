"""Runs of kempner's own: the ledger names the rank, its log says why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kempner.insight.triage.first_failure import triage_run
from kempner.insight.triage.rules import Sure
from kempner.insight.triage.verdict import Verdict
from kempner.run.record.lease import Lease
from kempner.run.record.run_dir import RunDirectory

RAN = Path(__file__).parent / "logs" / "ran"
"""What runs of two ranks with injected faults have left."""

REAL = [
    ("killed", "killed", 1, "SIGKILL"),
    ("crashed", "exception", 1, "RuntimeError: injected fault: crash rank 1"),
    ("oom", "host_out_of_memory", 0, "21.5 GiB of the host's 23.5 GiB are available"),
    ("diverged", "loss_not_finite", 0, "the loss diverged at step 7"),
]


@pytest.mark.parametrize(("name", "cause", "rank", "said"), REAL)
def test_a_run_that_really_failed(name: str, cause: str, rank: int, said: str) -> None:
    verdict = triage_run(RunDirectory(RAN / name))
    assert (verdict.cause, verdict.rank, verdict.node) == (cause, rank, "node1")
    assert said in verdict.first_error.raised
    (other,) = verdict.consequences
    assert other.startswith(f"rank {1 - rank}: ")


def test_the_rank_s_log_has_the_line_of_code() -> None:
    verdict = triage_run(RunDirectory(RAN / "crashed"))
    assert verdict.first_error.frame.endswith(
        "kempner/training/fault_injection.py:93 in maybe_inject"
    )
    assert "attempts 1-4 failed; this is the last of them" in verdict.notes
    later = triage_run(RunDirectory(RAN / "killed"))
    assert "a later attempt completed the run" in later.notes


STARTED = {"event": "attempt_started", "attempt": 1, "ranks": 4}


def ended(code: int, reason: str, culprit: int | None, **exits: int | None) -> dict[str, Any]:
    by_rank = {name.removeprefix("r"): status for name, status in exits.items()}
    event = {"event": "attempt_ended", "attempt": 1, "code": code, "reason": reason}
    return {**event, "culprit": culprit, "exits": by_rank}


def failed(raised: str, node: str = "n2") -> dict[str, Any]:
    event = {"event": "attempt_failed", "attempt": 1, "step": 7, "committed": 4}
    return {**event, "raised": raised, "node": node}


def judge(tmp_path: Path, *events: dict[str, Any]) -> Verdict:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    lines = [json.dumps({"schema": 1, "time": 1.0, **event}) for event in events]
    run.ledger.write_text("\n".join(lines) + "\n")
    return triage_run(run)


def test_a_hang_names_the_rank_that_the_others_waited_for(tmp_path: Path) -> None:
    hang = {
        "event": "hang",
        "attempt": 1,
        "reason": "no rank has made a step for 300 s; rank 2 is late",
        "laggard": 2,
        "waiting": {"the vote": [0, 1, 3]},
        "processes": ["rank 2 (pid 7) is stopped"],
    }
    end = ended(77, "hung", None, r0=77, r1=77, r2=-9, r3=77)
    verdict = judge(tmp_path, STARTED, hang, end)
    assert (verdict.cause, verdict.rank, verdict.sure) == ("hang", 2, Sure.CERTAIN)
    assert "rank 2 (pid 7) is stopped" in verdict.notes
    assert verdict.consequences == ("ranks 0-1, 3: exit code 77",)


CASES: Sequence[tuple[str, Sequence[dict[str, Any]], str, int | None]] = [
    (
        "a full disk",
        [
            ended(74, "rank 1 exited with code 74", 1, r0=76, r1=74),
            failed("saving step 8 failed: [Errno 28] No space left on device"),
        ],
        "disk_full",
        1,
    ),
    (
        "a GPU",
        [
            ended(1, "rank 3 exited with code 1 (crashed)", 3, r3=1),
            failed("RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        ],
        "gpu_memory_error",
        3,
    ),
    (
        "a node that is gone",
        [ended(76, "rank 3 disappeared without a message", 3, r3=None), failed("")],
        "peer_lost",
        3,
    ),
    (
        "nobody knows",
        [ended(1, "rank 3 disappeared without a message", 3, r3=None), failed("")],
        "rank_disappeared",
        3,
    ),
    ("Ctrl-C", [ended(130, "exited at once", None), failed("")], "interrupted", None),
    ("an exit code", [ended(1, "rank 2 exited with code 9", 2, r2=9), failed("")], "unknown", 2),
    (
        "bad data",
        [
            ended(65, "rank 0 exited with code 65", 0, r0=65),
            failed("tokens/part-0.tokens is damaged"),
        ],
        "bad_data",
        0,
    ),
]


@pytest.mark.parametrize(
    ("events", "cause", "rank"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_an_attempt_that_failed(
    events: Sequence[dict[str, Any]], cause: str, rank: int | None, tmp_path: Path
) -> None:
    verdict = judge(tmp_path, STARTED, *events)
    assert (verdict.cause, verdict.rank) == (cause, rank)
    assert verdict.node == "n2"


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("time_limit", "time_limit"),
        ("deadline", "time_limit"),
        ("preemption", "preemption"),
        ("requeue", "requeued"),
        ("cancel", "cancelled"),
        ("interrupt", "interrupted"),
        ("operator", "stopped"),
    ],
)
def test_a_run_that_was_stopped_says_why(reason: str, cause: str, tmp_path: Path) -> None:
    stop = {"event": "stopped", "attempt": 1, "step": 9, "reason": reason, "lost_steps": 0}
    verdict = judge(tmp_path, STARTED, stop, ended(75, "stopped", None, r0=75))
    assert (verdict.cause, verdict.rank) == (cause, None)


def test_a_run_without_an_end_is_running_or_unknown(tmp_path: Path) -> None:
    gone = judge(tmp_path, STARTED)
    assert not gone.known
    assert "ended without a message" in gone.says
    run = RunDirectory(tmp_path / "run")
    lease = Lease.acquire(run, lasts=45.0)
    assert triage_run(run).cause == "none"
    lease.release()
