"""A model of the user's own trains over ranks, stops, and goes on, as kempner's does."""

from __future__ import annotations

import json
import shutil

import pytest
from harness import ROOT, Run

OWN = ("--model.factory=own_model:build", "--model.options={width = 24, depth = 2}")
SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "dropout")


@pytest.fixture
def with_own_model(run: Run, reference: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs find the example of docs/ in their working directory, and train it."""
    shutil.copy(ROOT / "docs/examples/own_model.py", run.folder.parent)
    monkeypatch.chdir(run.folder.parent)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for one in (run, reference):
        lines = one.config.read_text().splitlines()
        kept = [line for line in lines if line.partition(" ")[0] not in SIZES]
        one.config.write_text("\n".join(kept))
        one.overrides += OWN


@pytest.mark.usefixtures("with_own_model")
def test_a_stop_changes_nothing_and_no_world_the_beginning(run: Run, reference: Run) -> None:
    reference.complete(2)
    job = run.supervise(2)
    run.reach(13, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert 13 <= run.latest() < 40
    run.complete(2)
    assert run.steps() == reference.steps()
    assert run.weights() == reference.weights()
    losses = [loss for loss, *_ in run.steps().values()]
    assert losses[-1] < losses[0] - 0.5
    assert "Warning" not in job.output()

    alone = run.train("--run.name=alone", "--train.max_steps=1", "--checkpoint.interval=1")
    assert alone.wait() == 0, alone.output()
    run.name = "alone"
    (first,) = [loss for loss, *_ in run.steps().values()]
    assert first == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.usefixtures("with_own_model")
def test_another_model_or_none_is_said_in_a_sentence(run: Run) -> None:
    run.complete(1, "--train.max_steps=2", "--checkpoint.interval=1")
    run.overrides = list(OWN[1:])
    other = run.train("--model.factory=own_model:Memory")
    assert other.wait() == 65
    assert "model.factory is 'own_model:Memory' but the checkpoint was made with" in other.output()
    run.overrides = []
    gone = run.supervise(1, "--run.name=gone", "--model.factory=own_modle:build")
    assert gone.wait() == 2
    assert "there is no module own_modle in the working directory" in gone.output()
    assert "Traceback" not in gone.output()


NOTES_ITS_ENVIRONMENT = """
import json, os
from pathlib import Path

import own_model


def build(options, vocab_size):
    Path(f"environment-{os.environ['RANK']}").write_text(json.dumps(dict(os.environ)))
    return own_model.build(options, vocab_size)
"""


@pytest.mark.usefixtures("with_own_model")
def test_what_is_configured_for_nccl_and_cuda_is_there_when_a_model_is_built(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what is exported, which stays."""
    folder = run.folder.parent
    (folder / "noting.py").write_text(NOTES_ITS_ENVIRONMENT)
    monkeypatch.setenv("NCCL_BUFFSIZE", "8388608")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    run.overrides = ["--model.factory=noting:build", *OWN[1:]]
    run.complete(
        2,
        "--train.max_steps=1",
        *("--distributed.nccl.ib_disable=false", "--distributed.nccl.ib_gid_index=3"),
        *("--distributed.nccl.buffsize=4194304", "--distributed.avoid_record_streams=true"),
        *("--distributed.cuda_device_max_connections=1", "--distributed.expandable_segments=true"),
    )
    for rank in range(2):
        seen = json.loads((folder / f"environment-{rank}").read_text())
        assert {name: seen.get(name) for name in EXPECTED} == EXPECTED
        assert "NCCL_NET_GDR_LEVEL" not in seen


EXPECTED = {
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_BUFFSIZE": "8388608",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True",
}
