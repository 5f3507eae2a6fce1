"""What is committed, by whom, and what a resume makes of damage."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import warm
from harness import KEMPNER, Run, drills, manifest, wait_until

from kempner.run.record.attempts import begin_attempt

pytestmark = pytest.mark.timeout(200)

STOCK_READER = """
import sys, torch
import torch.distributed.checkpoint as dcp
assert "kempner" not in sys.modules
metadata = dcp.FileSystemReader(sys.argv[1]).read_metadata()
state = {
    key: torch.full(entry.size, float("nan"), dtype=entry.properties.dtype)
    for key, entry in metadata.state_dict_metadata.items()
}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
assert not [m for m in sys.modules if m.startswith("kempner")]
assert all(torch.isfinite(value).all() for value in state.values())
torch.save(state, sys.argv[2])
"""


def stock_load(checkpoint: Path, out: Path) -> dict[str, object]:
    import torch

    subprocess.run(
        [sys.executable, "-I", "-c", STOCK_READER, str(checkpoint), str(out)], check=True
    )
    state: dict[str, object] = torch.load(out, weights_only=True)
    return state


def test_stock_dcp_reads_model_and_optimizer_of_any_world(
    run: Run, reference: Run, tmp_path: Path
) -> None:
    import torch

    run.complete(2, "--train.max_steps=3", "--model.dropout=0.0")
    reference.complete(1, "--train.max_steps=3", "--model.dropout=0.0")
    two = stock_load(run.checkpoints / "latest", tmp_path / "two.pt")
    one = stock_load(reference.checkpoints / "latest", tmp_path / "one.pt")
    assert two.keys() == one.keys()
    kinds = {key.partition(".")[0] + ":" + key.rpartition(".")[2] for key in one}
    assert {"model:weight", "optimizer:exp_avg", "optimizer:exp_avg_sq", "optimizer:step"} <= kinds
    for key, value in one.items():
        assert isinstance(value, torch.Tensor)
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-5)
    assert all(v == 3 for key, v in one.items() if key.endswith(".step"))


def test_a_damaged_checkpoint_is_set_aside_and_its_step_commits_again(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    job = run.train()
    run.reach(25, job)
    job.signal()
    assert job.wait() == 75
    stopped, earlier = run.latest(), max(s for s in run.committed() if s != run.latest())
    data = run.checkpoints / "latest" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[random.Random(3).randrange(len(content))] ^= 1
    data.write_bytes(content)

    job = run.train()
    run.reach(stopped, job)
    assert job.wait() == 0
    out = job.output()
    assert "checkpoint is damaged" in out
    assert "__0_0.distcp" in out
    assert f"resumed at step {earlier}" in out
    assert (run.checkpoints / f"step-{stopped:08d}.damaged-a2").is_dir()
    assert run.latest() == 40
    assert run.steps() == undisturbed(1, "--checkpoint.keep_last=9").steps()


def test_a_step_reached_twice_commits_again_under_a_fresh_name(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    keep = "--checkpoint.keep_last=9"
    run.go_on_from(undisturbed(1, keep))
    link = run.checkpoints / "latest"
    link.unlink()
    link.symlink_to("step-00000020")
    run.complete(1, keep)
    names = sorted(p.name for p in run.checkpoints.glob("step-*.abandoned-*"))
    assert names == ["step-00000030.abandoned-a2", "step-00000040.abandoned-a2"]
    assert run.committed() == [10, 20, 30, 40]
    assert run.steps() == undisturbed(1, "--checkpoint.keep_last=9").steps()


def test_nothing_left_that_verifies_is_no_fresh_start(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    run.go_on_from(undisturbed(1, "--train.max_steps=6"))
    (run.checkpoints / "latest" / ".metadata").unlink()
    for _ in range(2):
        job = run.train("--train.max_steps=6")
        assert job.wait() == 65, job.output()
        assert "no checkpoint in" in job.output()
        assert "Traceback" not in job.output()


def test_an_old_attempt_that_goes_on_commits_nothing(run: Run) -> None:
    endless = "--train.max_steps=1000000"
    job = run.supervise(1, endless)
    wait_until(lambda: run.committed(), "a commit", job=job)
    begun = begin_attempt(run.record)
    job.process.send_signal(signal.SIGCONT)
    before = set(run.committed())
    assert job.wait() == 74, job.output()
    late = set(run.committed()) - before
    # What was past its last check when the new attempt began may still appear, once.
    assert len(late) <= 1
    assert all(manifest(run.checkpoints / f"step-{s:08d}")["attempt"] == 1 for s in late)
    assert f"names attempt {begun.number}" in job.output()

    settled = run.committed()
    job = run.supervise(1, endless)
    wait_until(lambda: set(run.committed()) - set(settled), "a commit of the new one", job=job)
    job.signal()
    assert job.wait() == 75, job.output()


def fill(ballast: Path) -> None:
    """Take all the space that is left."""
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert shutil.disk_usage(ballast.parent).free == 0


def test_a_full_disk_fails_the_save_not_the_run(
    run: Run, undisturbed: Callable[..., Run], small_disk: Path
) -> None:
    checkpoints = small_disk / "checkpoints"
    job = run.train(f'--checkpoint.dir="{checkpoints}"', "--checkpoint.max_failures=1000")
    wait_until(lambda: (checkpoints / "latest").exists(), "a commit", job=job)
    fill(small_disk / "ballast")
    wait_until(lambda: run.events("checkpoint_failed"), "a failed save", job=job)
    assert (checkpoints / "latest" / "manifest.json").exists()
    (small_disk / "ballast").unlink()
    assert job.wait() == 0, job.output()
    assert manifest(checkpoints / "latest")["step"] == 40
    assert run.steps() == undisturbed(1, "--checkpoint.keep_last=9").steps()


def test_a_run_whose_whole_disk_is_full_trains_on(run: Run, small_disk: Path) -> None:
    endless = ("--train.max_steps=100000", "--checkpoint.max_failures=1000000")
    job = run.train(f'--run.dir="{small_disk}"', *endless)
    folder = small_disk / "run"
    wait_until(lambda: (folder / "checkpoints" / "latest").exists(), "a commit", job=job)
    fill(small_disk / "ballast")
    wait_until(lambda: "metrics.jsonl" in job.output(), "a word about the metrics", job=job)
    wait_until(lambda: "checkpoint failed" in job.output(), "a word about the save", job=job)
    (small_disk / "ballast").unlink()
    wait_until(lambda: "can write to file again" in job.output(), "the disk is noticed", job=job)
    job.signal()
    assert job.wait() == 75, job.output()
    last = manifest(folder / "checkpoints" / "latest")["step"]
    assert f"stopped after step {last}" in job.output()
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == list(range(1, last + 1))


@pytest.mark.parametrize(
    ("override", "culprit"),
    [
        ("--train.seed=1", "train.seed differs"),
        *drills(
            ("--train.seq_len=16", "data.dataset_path or train.seq_len differs"),
            ("--model.n_layers=3", "model.n_layers is 3"),
        ),
    ],
)
def test_a_resume_with_another_seed_data_or_model_is_refused(
    run: Run, undisturbed: Callable[..., Run], override: str, culprit: str
) -> None:
    run.go_on_from(undisturbed(1, "--train.max_steps=6"))
    job = run.train("--train.max_steps=8", override)
    assert job.wait() == 65
    assert culprit in job.output()
    assert "Traceback" not in job.output()


def test_another_seed_asked_for_by_name_is_accepted(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    run.go_on_from(undisturbed(1, "--train.max_steps=6"))
    accept = '--checkpoint.accept_changes=["seed"]'
    run.complete(1, "--train.max_steps=8", "--train.seed=1", accept)
    assert run.latest() == 8


def test_the_checkpoint_commands(run: Run, tmp_path: Path) -> None:
    run.complete(1)

    kempner = partial(warm.complete, *KEMPNER)
    code, listed = kempner("checkpoint", "list", run.record.path)
    assert code == 0
    assert [line.split()[0] for line in listed.splitlines()] == ["step", "20", "30", "40"]
    assert listed.splitlines()[-1].endswith("latest")
    assert kempner("checkpoint", "verify", run.checkpoints)[0] == 0
    assert "40" in kempner("status", run.record.path)[1]

    sidecar = run.checkpoints / "step-00000030" / "sums-00000.json"
    shutil.copy(sidecar, tmp_path)
    sidecar.write_bytes(sidecar.read_bytes()[:-2])
    code, damaged = kempner("checkpoint", "verify", run.record.path)
    assert code == 65
    assert "step-00000030: damaged" in damaged
    assert "sums-00000.json" in damaged
    assert kempner("checkpoint", "verify", tmp_path)[0] == 2
