"""A user who can write to a checkpoint can put a pickle into any of its files; it is never run."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import commit_state, small_state

from kempner.checkpoint.format.compact_index import INDEX
from kempner.checkpoint.format.manifest import encode_sidecar, read, sum_file, whole_sum
from kempner.checkpoint.tensors.load import fill, open_contents
from kempner.cli.entry import main
from kempner.run.process.exit_codes import DataError
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")

FILES = ["manifest.json", ".metadata", "sums-00000.json", "__0_0.distcp", INDEX]


class Runs:
    """Pickles as a call of its function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def as_pickle(mark: Path) -> bytes:
    return pickle.dumps(Runs(os.mkdir, str(mark)))


def as_container(mark: Path) -> bytes:
    content = io.BytesIO()
    torch.save(Runs(os.mkdir, str(mark)), content)
    return content.getvalue()


def plant(checkpoint: Path, name: str, attack: bytes) -> None:
    """Put `attack` at the start of a file, and make every checksum around it fit."""
    path = checkpoint / name
    content = path.read_bytes()
    path.write_bytes(attack + content[len(attack) :] if name.endswith(".distcp") else attack)
    if name == "manifest.json":
        return
    fields = json.loads((checkpoint / "manifest.json").read_bytes())
    files, sidecar = fields["files"], "sums-00000.json"
    if name.endswith(".distcp"):
        (checkpoint / sidecar).write_bytes(encode_sidecar({name: sum_file(path)}))
        name = sidecar
    content = (checkpoint / name).read_bytes()
    files[name] = {"bytes": len(content), "xxh3_128": whole_sum(content)}
    del fields["checksum"]
    canonical = (json.dumps(fields, sort_keys=True, indent=2) + "\n").encode()
    fields["checksum"] = whole_sum(canonical)
    canonical = (json.dumps(fields, sort_keys=True, indent=2) + "\n").encode()
    (checkpoint / "manifest.json").write_bytes(canonical)


def load(checkpoint: Path) -> None:
    manifest = read(checkpoint)
    contents = open_contents(checkpoint, manifest)
    table = {key: torch.zeros_like(tensor) for key, tensor in small_state().items()}
    fill(table, checkpoint, manifest, contents)


@pytest.mark.parametrize("form", [as_pickle, as_container])
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_checkpoint_can_run_anything(
    tmp_path: Path, name: str, form: Callable[[Path], bytes]
) -> None:
    mark = tmp_path / "executed"
    run = RunDirectory(tmp_path / "run")
    checkpoint = commit_state(run, small_state(), 10)
    plant(checkpoint, name, form(mark))
    (tmp_path / "out").mkdir()
    with suppress(DataError):  # what stands beside a tensor's bytes may go unnoticed, and unused
        load(checkpoint)
    commands: list[list[str]] = [["list"], ["verify"]]
    commands += [
        ["export", f"--format={format_}", f"--out={tmp_path / 'out' / format_}"]
        for format_ in ("dcp", "safetensors", "torch")
    ]
    for command, *options in commands:
        with pytest.raises(SystemExit):
            main(["checkpoint", command, str(run.path), *options])
    with pytest.raises(SystemExit):
        main(["checkpoint", "import", str(checkpoint), f"--into={tmp_path / 'imported'}"])
    assert not mark.exists()


@pytest.mark.parametrize("form", [as_pickle, as_container])
def test_it_would_have_run(tmp_path: Path, form: Callable[[Path], bytes]) -> None:
    mark = tmp_path / "executed"
    content = form(mark)
    if form is as_pickle:
        pickle.loads(content)
    else:
        torch.load(io.BytesIO(content), weights_only=False)
    assert mark.exists()
