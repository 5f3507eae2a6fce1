"""Steps of a run that had faults are computed again, to the bit."""

from __future__ import annotations

import json
import random
import subprocess
import sys

from harness import Run

from kempner.run.record.ledger import read_lines


def replay(run: Run, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kempner", "replay", str(run.record.path)]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_steps_of_a_run_with_faults_are_computed_again(run: Run) -> None:
    """A kill, a rollback and another world lie behind the steps; then one is not what it was."""
    options = ("--train.max_steps=30", "--checkpoint.interval=5", "--checkpoint.keep_every=5")
    spikes = "; ".join(f"nan rank 0 at step {step}" for step in (7, 8))
    once = ("--resilience.rollback_after=2",)
    job = run.supervise(2, *options, *once, KEMPNER_FAULTS=f"kill rank 1 at step 18; {spikes}")
    assert job.wait() == 0, job.output()
    run.complete(3, "--train.max_steps=40", *options[1:], *once)
    files = {path: path.stat().st_mtime_ns for path in run.checkpoints.rglob("*")}

    step, trace = random.Random(36).randrange(11, 29), run.folder / "trace.jsonl"
    done = replay(run, "--step", step, "--to", 30, "--trace", trace)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert f"{31 - step} steps: equal to the bit" in done.stdout
    assert "weights and optimizer: equal to the bit" in done.stdout, "also while it is traced"
    traced = [line for line in read_lines(trace) if line["kind"] == "step"]
    shown = {line["step"]: (line["loss"], line["grad_norm"]) for line in traced}
    assert shown == {n: run.steps()[n][:2] for n in range(step, 31)}
    taken = [n for line in read_lines(trace) for n in line.get("positions", ())]
    assert taken == run.taken()[8 * (step - 1) : 8 * 30], "the samples of each micro batch"
    assert files == {path: path.stat().st_mtime_ns for path in run.checkpoints.rglob("*")}
    assert not list(run.record.replays.iterdir())

    done = replay(run, "--step", 9)
    assert done.returncode == 2
    assert "went back from step" in done.stderr

    lines = run.record.metrics.read_text().splitlines()
    changed = [json.loads(line) for line in lines]
    for line in changed:
        if line["step"] == 33:
            line["loss"] += 2**-20
    run.record.metrics.write_text("".join(json.dumps(line) + "\n" for line in changed))
    done = replay(run, "--step", 32, "--to", 34)
    assert done.returncode == 1
    assert "step 33 differs: loss" in done.stdout
