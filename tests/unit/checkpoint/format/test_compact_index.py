"""The index says what `.metadata` does, and nothing in it is believed unseen."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import commit_state, small_state
from torch.distributed.checkpoint.metadata import Metadata

from kempner.checkpoint.convert.tensor_copy import Source
from kempner.checkpoint.format.compact_index import (
    INDEX,
    CompactIndex,
    ListedIndex,
    ListedPart,
    decode,
    encode,
    encode_listed,
)
from kempner.checkpoint.format.contents import Contents, Extents, Part, Saved, overlap
from kempner.checkpoint.format.manifest import encode as encode_manifest
from kempner.checkpoint.format.manifest import read, whole_sum
from kempner.checkpoint.format.shard_plan import (
    Placed,
    TensorSpec,
    by_file,
    data_file,
    file_length,
    place,
)
from kempner.checkpoint.tensors.dcp_metadata import build_metadata
from kempner.checkpoint.tensors.file_buffer import container
from kempner.checkpoint.tensors.load import open_contents
from kempner.run.process.exit_codes import DataError
from kempner.run.record.run_dir import RunDirectory

SPECS = [
    TensorSpec("model.rows", (70, 9), "float32", (2, 3), (None, 0)),
    TensorSpec("model.twice", (70, 9), "bfloat16", (2, 3), (0, 0)),
    TensorSpec("model.columns", (7, 900), "float32", (2, 3), (1, None)),
    TensorSpec("optimizer.rows.step", (), "float32", (6,), (None,)),
    TensorSpec("model.empty", (0, 4), "int64", (6,), (0,)),
    TensorSpec("model.frozen", (70, 9), "float32", (2, 3), (None, 0), base=True),
]


def test_it_comes_back_as_it_was() -> None:
    content = encode(SPECS, 6, container)
    index = decode(content, Path(INDEX))
    assert isinstance(index, CompactIndex)
    assert (index.specs, index.world) == (SPECS, 6)
    assert content == encode(SPECS, 6, container)


def listed_in(metadata: Metadata, key: str, offsets: Any, sizes: Any) -> list[Part]:
    """The parts in DCP's `.metadata` that overlap a box."""
    return [
        Part(tuple(index.offset or ()), tuple(chunk.sizes), at.relative_path, at.offset, at.length)
        for index, at in metadata.storage_data.items()
        if index.fqn == key
        and (chunk := metadata.state_dict_metadata[key].chunks[index.index])  # type: ignore[union-attr]
        and overlap(offsets, sizes, chunk.offsets, chunk.sizes) is not None
    ]


def files(
    specs: list[TensorSpec], world: int, extents: Extents
) -> Iterator[tuple[int, list[Placed]]]:
    """The number and the contents of each file."""
    for nth, part in enumerate(by_file(specs)):
        for rank in range(world):
            yield nth * world + rank, place(part, rank, extents)


def listed_index(specs: list[TensorSpec], world: int, extents: Extents = container) -> ListedIndex:
    """What an import would write of the same files."""
    pieces: dict[str, list[ListedPart]] = {spec.key: [] for spec in specs}
    for number, placed in files(specs, world, extents):
        for item in placed:
            pieces[item.chunk.key].append(ListedPart(number, item.chunk.offsets, item.chunk.sizes))
    tensors = {spec.key: Saved(spec.shape, spec.dtype) for spec in specs}
    return ListedIndex.of(tensors, pieces, extents)


@pytest.mark.parametrize("by_plan", [True, False], ids=["planned", "listed"])
def test_it_finds_the_parts_that_metadata_lists(by_plan: bool) -> None:
    stock = pickle.loads(build_metadata(SPECS, 6))
    index: Contents = CompactIndex(SPECS, 6, container)
    if not by_plan:
        content = encode_listed(listed_index(SPECS, 6))
        index = decode(content, Path(INDEX))
        assert isinstance(index, ListedIndex)
    assert index.tensors == {spec.key: Saved(spec.shape, spec.dtype) for spec in SPECS}
    assert index.tensors.keys() == stock.state_dict_metadata.keys()
    for key, saved in index.tensors.items():
        if 0 in saved.shape:
            continue
        for at in range(saved.shape[0] if saved.shape else 1):
            offsets = (at, *[0] * (len(saved.shape) - 1)) if saved.shape else ()
            sizes = (1, *saved.shape[1:]) if saved.shape else ()
            found = sorted(index.parts(key, offsets, sizes), key=lambda part: part.offsets)
            listed = listed_in(stock, key, offsets, sizes)
            assert found == sorted(listed, key=lambda part: part.offsets)
            assert found


@pytest.mark.parametrize("by_plan", [True, False], ids=["planned", "listed"])
def test_another_torch_finds_what_one_has_written(by_plan: bool) -> None:
    """One whose containers are longer, as the index says."""

    @dataclass(frozen=True)
    class Longer:
        data: int
        length: int

    def longer(dtype: str, sizes: tuple[int, ...]) -> Longer:
        around = container(dtype, sizes)
        return Longer(around.data, around.length + 1000)

    content = encode(SPECS, 6, longer)
    if not by_plan:
        content = encode_listed(listed_index(SPECS, 6, longer))
    index = decode(content, Path(INDEX))
    for number, placed in files(SPECS, 6, longer):
        for item in placed:
            found = list(index.parts(item.chunk.key, item.chunk.offsets, item.chunk.sizes))
            here = Part(item.chunk.offsets, item.chunk.sizes, data_file(number), item.start, 0)
            assert 0 in item.chunk.sizes or found == [replace(here, length=item.container.length)]


def test_a_part_whose_container_is_not_listed_is_damage() -> None:
    content = encode(SPECS[:1], 6, container).replace(b'"float32",[24,9],', b'"float32",[25,9],')
    index = decode(content, Path(INDEX))
    with pytest.raises(DataError, match=r"does not say how long a container of float32 \(24, 9\)"):
        list(index.parts("model.rows", (0, 0), (1, 9)))


def test_it_stays_small_where_metadata_would_not() -> None:
    world = 16_384
    specs = [
        TensorSpec(f"model.layers.{n}.weight", (8192, 8192), "float32", (world,), (0,))
        for n in range(3_000)
    ]
    assert len(encode(specs, world, container)) < 1 << 20
    index = CompactIndex(specs, world, container)
    (part,) = index.parts("model.layers.7.weight", (4321, 0), (1, 8192))
    assert (part.file, part.offsets, part.sizes) == ("__4321_0.distcp", (4321, 0), (1, 8192))
    assert part.start + part.length <= file_length(place(specs, 4321, container))


def test_a_listed_one_stays_small_too() -> None:
    """What hundreds of ranks have cut alike is listed once."""
    tensors = {f"model.{n}": Saved((512, 64), "float32") for n in range(3_000)}
    cut = [ListedPart(rank, (rank, 0), (1, 64)) for rank in range(512)]
    index = ListedIndex.of(tensors, dict.fromkeys(tensors, cut), container)
    assert len(encode_listed(index)) < 1 << 18


def test_a_checkpoint_with_nothing_but_an_index_loads_bit_for_bit(tmp_path: Path) -> None:
    run, state = RunDirectory(tmp_path / "run"), small_state()
    checkpoint = commit_state(run, state, 10, world=3, metadata=False)
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
        ({"base": [7]}, "it is not an index"),
        ({"containers": None}, "it is not an index"),
        ({"containers": [["float32", [2], 8]]}, "it is not an index"),
        ({"containers": [["float32", [2], 8, 4]]}, "a container of float32 .2. makes no sense"),
        ({"cuts": 5}, "it is not an index"),
        ({"cuts": [[[0, [0]]]]}, "it is not an index"),
        ({"cuts": [[[-1, [0], [2]]]]}, "a part at .0. makes no sense"),
        ({"cuts": [[[0, [0], [2, 2]]]]}, "a part at .0. makes no sense"),
        ({"cuts": [[]], "tensors": [["w", [2], "float32", 1]]}, "'w' makes no sense"),
        ({"cuts": [[]], "tensors": [["w", [2], "float32", -1]]}, "'w' makes no sense"),
        ({"cuts": [[]], "tensors": [["w", [-2], "float32", 0]]}, "'w' makes no sense"),
        ({"cuts": [[[0, [0], [2]]]], "tensors": [["w", [2, 2], "int8", 0]]}, "'w' makes no sense"),
        ({"cuts": [[]], "tensors": [["w", [2], "load", 0]]}, "w is load, which is not a dtype"),
    ],
)
def test_what_is_no_index_is_refused_even_with_a_matching_manifest(
    tmp_path: Path, content: Any, words: str
) -> None:
    checkpoint = commit_state(RunDirectory(tmp_path / "run"), small_state(), 10)
    if isinstance(content, dict):
        content = json.dumps(
            {"format": 1, "world": 1, "tensors": [], "containers": [], **content}
        ).encode()
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
