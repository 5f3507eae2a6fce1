"""`kempner logs --follow`, `kempner stop` and `kempner eval`, on a run that trains."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from harness import KEMPNER, Run, wait_until
from patience import scaled


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KEMPNER, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )


def test_a_run_is_followed_stopped_and_evaluated(run: Run, tmp_path: Path) -> None:
    job = run.supervise(
        2,
        "--train.max_steps=100000",
        "--eval.interval=5",
        f"--eval.dataset_path={run.data}",
        "--supervise.lease=1",
    )
    path = run.record.path
    wait_until(run.record.ledger.is_file, "the run's ledger", job=job)
    with open(tmp_path / "followed", "w") as followed:
        follows = subprocess.Popen([*KEMPNER, "logs", str(path), "--follow"], stdout=followed)
        run.reach(6, job)
        stopped = command("stop", path)
        assert stopped.returncode == 0, stopped.stderr
        step = run.latest()
        assert stopped.stdout.splitlines()[-1].endswith(f"continues after step {step}")
        assert job.wait() == 75
        assert follows.wait(scaled(60)) == 0
    lines = (tmp_path / "followed").read_text().splitlines()
    assert {line.split("]")[0] for line in lines} >= {"[rank 0", "[rank 1", "[supervisor"}
    assert any("kempner stop: stopping after this step" in line for line in lines)
    assert run.events("stop_requested")[-1]["reason"] == "operator"

    only = command("logs", path, "--rank", 1)
    assert only.returncode == 0
    assert {line.split("]")[0] for line in only.stdout.splitlines()} == {"[rank 1"}
    assert command("logs", path, "--rank", 7).returncode == 2
    again = command("stop", path)
    assert (again.returncode, "there is nothing to stop" in again.stdout) == (0, True)

    run.complete(2, f"--train.max_steps={step + 5 - step % 5}", "--eval.interval=5",
                 f"--eval.sets={{more = '{run.data}'}}",
                 f"--eval.dataset_path={run.data}")  # fmt: skip
    known = run.events("evaluated")[-1]
    told = json.loads(command("eval", path, "--json").stdout)
    assert told["step"] == known["step"]
    assert told["loss"] == pytest.approx(known["loss"], rel=1e-5)
    assert told["sets"]["more"]["loss"] == told["loss"]
    (shown,) = json.loads(command("status", path, "--json").stdout)
    for scores in (told["sets"]["more"], told):
        for name, number in shown["eval_sets"]["more"].items():
            assert scores[name] == pytest.approx(number, rel=1e-5)
    assert told["bits_per_byte"] > 0
    exported = command("checkpoint", "export", path, "--out", tmp_path / "model")
    assert exported.returncode == 0, exported.stderr
    card = (tmp_path / "model" / "README.md").read_text()
    starts = len({entry["attempt"] for entry in run.events("attempt_started")})
    index = json.loads((run.data / "index.json").read_text())
    for row in (
        f"| Steps | {known['step']} of {known['step']} |",
        f"| Restarts | {starts - 1}, 0 steps made again |",
        f"| Loss on held-out data | {known['loss']:.4f} nats per token",
        f"| Loss on more | {known['loss']:.4f} nats per token",
        f"{index['tokens']:,} tokens, {index['documents']:,} documents, digest ",
        "| Ranks | 2 |",
        "max_steps = ",
    ):
        assert row in card, card
    assert str(run.folder) not in card
    limited = json.loads(command("eval", path, "--json", "--max-batches", 1).stdout)
    assert limited["tokens"] < told["tokens"]


def test_a_run_without_held_out_data_is_evaluated_on_what_is_named(run: Run) -> None:
    run.complete(1, "--train.max_steps=2")
    refused = command("eval", run.record.path)
    assert refused.returncode == 2
    assert "has no held-out data (eval.dataset_path): name some with --data DIR" in refused.stderr
    named = command("eval", run.record.path, "--data", run.data)
    assert named.returncode == 0, named.stderr
    assert named.stdout.startswith("step 2: loss ")
