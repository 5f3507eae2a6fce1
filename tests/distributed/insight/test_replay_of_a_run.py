"""Steps of a run that had faults are computed again, to the bit."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import Run

from kempner.data.files.token_file import Corpus
from kempner.model.spec.slot_tree import slots_of
from kempner.run.record.ledger import read_lines


def replay(run: Run, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kempner", "replay", str(run.record.path)]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_steps_of_a_run_with_faults_are_computed_again(run: Run, corpus: Path) -> None:
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
    tokens = np.concatenate([[256], (stream := Corpus.open(corpus)).read(0, stream.index.tokens)])
    begins = np.flatnonzero(tokens[:-1] == 256)
    for line in (line for line in read_lines(trace) if line["kind"] == "batch"):
        of_each = [
            [
                int(max(begins[begins <= 32 * n])),
                *begins[(begins > 32 * n) & (begins < 32 * n + 32)],
            ]
            for n in line["samples"]
        ]
        assert line["documents"] == of_each
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


def test_two_runs_part_in_an_operation_that_is_named(run: Run, reference: Run) -> None:
    """On one rank and on two, with other positions."""
    options = ("--train.same_on_any_world=true", "--train.max_steps=3")
    reference.complete(1, *options)
    run.complete(2, *options, "--model.rope_theta=20000.0")
    pair = [str(reference.record.path), str(run.record.path)]
    command = [sys.executable, "-m", "kempner", "compare", *pair]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "step 1 differs: loss" in done.stdout
    assert "configuration: model.rope_theta 10000.0 -> 20000.0" in done.stdout
    assert done.stdout.count("1 step: equal to the bit") == 2, "each is what it was"
    assert "operation: the output of layers.0.attention.wo in micro batch 0 differs" in done.stdout
    assert "equal up to the output of layers.0.attention.wv" in done.stdout
    done = subprocess.run([*command, "--quick"], capture_output=True, text=True, check=False)
    assert (done.returncode, "operation" in done.stdout) == (1, False)


def test_a_replay_on_other_ranks_names_the_slot_that_was_wrong(run: Run) -> None:
    """On one rank, which has no replica."""
    mesh = "--parallelism.data_parallel_replicate_degree=2"
    options = ("--train.same_on_any_world=true", "--integrity.parts_interval=1", mesh)
    fault = "flip rank 1 by 20 at step 3 in gradients"
    job = run.supervise(
        2, *options, "--train.max_steps=4", "--checkpoint.interval=2", KEMPNER_FAULTS=fault
    )
    assert job.wait() == 0, job.output()
    parts = {line["step"]: line["state"].values() for line in read_lines(run.record.parts)}
    sums = {step: sum(int(one, 16) for one in state) % 2**64 for step, state in parts.items()}
    told = {step: int(line[2] or "", 16) for step, line in run.steps().items()}
    assert sums == told, "the fingerprint of the state is the sum of its tensors'"
    done = replay(run, "--step", 3, "--ranks", 1)
    assert done.returncode == 1, (done.stdout, done.stderr)
    found = re.search(r"parts of step 3: slot (\d+) of (\d+), on 2 ranks, differs", done.stdout)
    assert found is not None, done.stdout
    slot, slots = map(int, found.groups())
    assert slot in slots_of(slots, 1, 2)
