"""The index of a large world says what `.metadata` would, and nothing in it is believed unseen."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import commit_state, small_state

from kempner.checkpoint.convert.tensor_copy import Source
from kempner.checkpoint.format.compact_index import INDEX, CompactIndex, decode, encode
from kempner.checkpoint.format.manifest import encode as encode_manifest
from kempner.checkpoint.format.manifest import read, whole_sum
from kempner.checkpoint.format.shard_plan import TensorSpec, file_length, place
from kempner.checkpoint.tensors.dcp_metadata import build_metadata
from kempner.checkpoint.tensors.dcp_reader import StockContents, open_contents
from kempner.checkpoint.tensors.file_buffer import container
from kempner.run.process.exit_codes import DataError
from kempner.run.record.run_dir import RunDirectory

SPECS = [
    TensorSpec("model.rows", (70, 9), "float32", (2, 3), (None, 0)),
    TensorSpec("model.twice", (70, 9), "bfloat16", (2, 3), (0, 0)),
    TensorSpec("model.columns", (7, 900), "float32", (2, 3), (1, None)),
    TensorSpec("optimizer.rows.step", (), "float32", (6,), (None,)),
    TensorSpec("model.empty", (0, 4), "int64", (6,), (0,)),
]


def test_it_comes_back_as_it_was() -> None:
    content = encode(SPECS, 6)
    assert decode(content, Path(INDEX)) == (SPECS, 6)
    assert content == encode(SPECS, 6)


def test_it_finds_the_parts_that_metadata_lists() -> None:
    stock = StockContents(pickle.loads(build_metadata(SPECS, 6)))
    index = CompactIndex(SPECS, 6, container)
    assert index.tensors == stock.tensors
    for key, saved in index.tensors.items():
        if 0 in saved.shape:
            continue
        for at in range(saved.shape[0] if saved.shape else 1):
            offsets = (at, *[0] * (len(saved.shape) - 1)) if saved.shape else ()
            sizes = (1, *saved.shape[1:]) if saved.shape else ()
            found = sorted(index.parts(key, offsets, sizes), key=lambda part: part.offsets)
            listed = sorted(stock.parts(key, offsets, sizes), key=lambda part: part.offsets)
            assert found == listed
            assert found


def test_it_stays_small_where_metadata_would_not() -> None:
    world = 16_384
    specs = [
        TensorSpec(f"model.layers.{n}.weight", (8192, 8192), "float32", (world,), (0,))
        for n in range(3_000)
    ]
    assert len(encode(specs, world)) < 1 << 20
    index = CompactIndex(specs, world, container)
    (part,) = index.parts("model.layers.7.weight", (4321, 0), (1, 8192))
    assert (part.file, part.offsets, part.sizes) == ("__4321_0.distcp", (4321, 0), (1, 8192))
    assert part.start + part.length <= file_length(place(specs, 4321, container))


def test_a_checkpoint_with_an_index_loads_bit_for_bit(tmp_path: Path) -> None:
    run, state = RunDirectory(tmp_path / "run"), small_state()
    checkpoint = commit_state(run, state, 10, world=3, compact=True)
    assert not (checkpoint / ".metadata").exists()
    source = Source.open(checkpoint)
    loaded = dict(source.read(source.contents.tensors))
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is not an index"),
        (b"[]", "it is not an index"),
        (b"[" * 100_000, "it is not an index"),
        (pickle.dumps({"format": 1}), "it is not an index"),
        ({"format": 2}, "format 2"),
        ({"tensors": [["w", [2], "float32", [1]]]}, "it is not an index"),
        ({"tensors": [["w", [-2], "float32", [1], [0]]]}, "'w' makes no sense"),
        ({"tensors": [["w", [2.5], "float32", [1], [0]]]}, "'w' makes no sense"),
        ({"tensors": [["w", [2], "float32", [0], [0]]]}, "'w' makes no sense"),
        ({"tensors": [["w", [2], "float32", [1], [1]]]}, "'w' makes no sense"),
        ({"tensors": [["w", [2], "float32", [1], [0, 0]]]}, "'w' makes no sense"),
        ({"tensors": [["w", [2], "os.system", [1], [0]]]}, "'w' makes no sense"),
        ({"tensors": [["w", [2], "load", [1], [0]]]}, "w is load, which is not a dtype"),
    ],
)
def test_what_is_no_index_is_refused_even_with_a_matching_manifest(
    tmp_path: Path, content: Any, words: str
) -> None:
    checkpoint = commit_state(RunDirectory(tmp_path / "run"), small_state(), 10, compact=True)
    if isinstance(content, dict):
        content = json.dumps({"format": 1, "world": 1, "tensors": [], **content}).encode()
    (checkpoint / INDEX).write_bytes(content)
    fields = json.loads((checkpoint / "manifest.json").read_bytes())
    fields["files"][INDEX] = {"bytes": len(content), "xxh3_128": whole_sum(content)}
    del fields["checksum"]
    manifest = read_again(checkpoint, fields)
    with pytest.raises(DataError, match=words):
        open_contents(checkpoint, manifest)


def read_again(checkpoint: Path, fields: dict[str, Any]) -> Any:
    """The manifest with other fields, checksum and all."""
    canonical = (json.dumps(fields, sort_keys=True, indent=2) + "\n").encode()
    fields["checksum"] = whole_sum(canonical)
    canonical = (json.dumps(fields, sort_keys=True, indent=2) + "\n").encode()
    (checkpoint / "manifest.json").write_bytes(canonical)
    manifest = read(checkpoint)
    assert encode_manifest(manifest) == canonical
    return manifest
