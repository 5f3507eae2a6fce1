"""A checkpoint of kempner goes on in another run where it stood."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from saved import commit_state, small_state

from kempner.checkpoint.convert.tensor_copy import Source
from kempner.checkpoint.format.manifest import Rollback, TrainState, encode, read
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from kempner.checkpoint.io.verify import verify
from kempner.cli.entry import main
from kempner.run.record.run_dir import RunDirectory

Captured = pytest.CaptureFixture[str]

STATE = TrainState(600, 9600, 12345, (2.5, 2.25), (Rollback(500, 480, 7680, 8000),))


def kempner(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", "import", *map(str, arguments)])
    return left.value.code


@pytest.fixture(params=[True, False], ids=["metadata", "index alone"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    """With a checkpoint of step 600 by three ranks, and one before."""
    run = RunDirectory(tmp_path / "run")
    commit_state(run, small_state(), 300)
    path = commit_state(run, small_state(), 600, world=3, metadata=request.param)
    known = replace(read(path), train_state=STATE)
    identity = replace(known.identity, data_fingerprint="ab", seed=7)
    (path / MANIFEST).write_bytes(encode(replace(known, identity=identity)))
    return run


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/step-00000600"])
def test_all_of_the_train_state_is_kept(
    run: RunDirectory, tmp_path: Path, where: str, capsys: Captured
) -> None:
    assert kempner(run.path / where, "--into", tmp_path / "next") == 0
    said = capsys.readouterr().out
    folder = CheckpointFolder(tmp_path / "next" / "checkpoints")
    assert f"{folder.step(600)}: committed, step 600, cursor 9600\nall of the train state" in said
    assert folder.latest() == 600
    assert verify(folder.step(600)) == []
    before, after = read(run.checkpoints / "latest"), read(folder.step(600))
    assert (after.train_state, after.identity, after.files) == (
        STATE,
        before.identity,
        before.files,
    )
    assert after.attempt == 0
    source = Source.open(folder.step(600))
    found = dict(source.read(source.contents.tensors))
    assert {key: tensor.tolist() for key, tensor in found.items()} == {
        key: tensor.tolist() for key, tensor in small_state().items()
    }


def test_another_place_is_a_new_beginning(run: RunDirectory, tmp_path: Path) -> None:
    assert kempner(run.path, "--into", tmp_path / "next", "--step=0", "--cursor=0") == 0
    manifest = read(tmp_path / "next" / "checkpoints" / "step-00000000")
    assert manifest.train_state == TrainState()
    assert (manifest.identity.seed, manifest.identity.data_fingerprint) == (None, None)


@pytest.mark.parametrize("file", ["__1_0.distcp", "sums-00001.json"])
def test_damage_is_not_imported(
    run: RunDirectory, tmp_path: Path, file: str, capsys: Captured
) -> None:
    path = run.checkpoints / "step-00000600" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert kempner(run.path, "--into", tmp_path / "next") == 65
    said = capsys.readouterr().err
    assert file in said
    assert said.count("\n") == 1
    assert list((tmp_path / "next" / "checkpoints").iterdir()) == []
