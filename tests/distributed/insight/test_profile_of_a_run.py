"""A rank is traced while its run goes on, and nothing else changes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

from harness import Run


def test_a_rank_is_traced_while_it_trains(run: Run, reference: Run) -> None:
    job = run.supervise(2, "--train.max_steps=100000", "--profiling.steps=[3]")
    run.reach(10, job)
    command = [sys.executable, "-m", "kempner", "profile", str(run.record.path), "--rank", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (trace,) = done.stdout.splitlines()
    assert trace.endswith("rank-00001.json.gz")
    with gzip.open(trace) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} & names
    assert (run.record.profiles / "step-00000003-rank-00000.json.gz").exists()

    wrong = subprocess.run([*command[:-1], "2"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (2, "kempner: there is no rank 2: the run has 2\n")
    job.signal()
    assert job.wait() == 75
    over = subprocess.run(command, capture_output=True, text=True, check=False)
    assert over.returncode == 2
    assert "does not train now (stopped" in over.stderr

    last = max(run.steps())
    job = reference.supervise(2, "--train.max_steps=100000")
    reference.reach(last, job)
    job.signal()
    assert job.wait() == 75
    made = reference.steps()
    assert {step: made[step] for step in run.steps()} == run.steps()
