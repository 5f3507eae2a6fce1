"""A load reads what it needs, checks it, and never leaves an element as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kempner.checkpoint.format.compact_index import INDEX, CompactIndex, encode
from kempner.checkpoint.format.contents import Contents, Part
from kempner.checkpoint.format.manifest import (
    BLOCK_BYTES,
    FileEntry,
    Identity,
    Manifest,
    TrainState,
    encode_sidecar,
    sidecar_name,
    sum_file,
    whole_sum,
)
from kempner.checkpoint.format.names import MANIFEST, METADATA
from kempner.checkpoint.format.shard_plan import TensorSpec, data_file, place
from kempner.checkpoint.tensors.dcp_metadata import build_metadata
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, tensor_specs
from kempner.checkpoint.tensors.load import fill, open_contents
from kempner.checkpoint.tensors.state import check_shapes
from kempner.run.process.exit_codes import DataError, MismatchError

torch.manual_seed(0)
STATE = {
    "weights": torch.randn(3000, 500),
    "half": torch.randn(5, 3, 2).bfloat16(),
    "counter": torch.tensor(7.0),
    "ids": torch.arange(13),
    "empty": torch.zeros(0, 4),
    **{f"small.{n}": torch.randn(40) for n in range(50)},
}


def list_files(folder: Path) -> Manifest:
    """A manifest of all files in a folder."""
    files: dict[str, FileEntry] = {}
    for rank, path in enumerate(sorted(folder.glob("*.distcp"))):
        sidecar = encode_sidecar({path.name: sum_file(path)})
        (folder / sidecar_name(rank)).write_bytes(sidecar)
        files[path.name] = FileEntry(bytes=path.stat().st_size, sums=sidecar_name(rank))
        files[sidecar_name(rank)] = FileEntry(len(sidecar), xxh3_128=whole_sum(sidecar))
    for name in (INDEX, METADATA):
        described = (folder / name).read_bytes()
        files[name] = FileEntry(len(described), xxh3_128=whole_sum(described))
    return Manifest(TrainState(), Identity(1, {}, 0, "", {}), 1, 0.0, files)


def write_ours(folder: Path, cut: int | None = 0, world: int = 3) -> Manifest:
    specs = [
        TensorSpec(s.key, s.shape, s.dtype, (world,), (cut if len(s.shape) > 1 else None,))
        for s in tensor_specs(STATE, 1)
    ]
    folder.mkdir()
    for rank in range(world):
        placed = place(specs, rank, container)
        image = FileBuffer(placed)
        for view, item in zip(image.views, placed, strict=True):
            part = STATE[item.chunk.key]
            for dim, at in enumerate(item.chunk.offsets):
                part = part.narrow(dim, at, item.chunk.sizes[dim])
            view.copy_(part)
        (folder / data_file(rank)).write_bytes(image.content)
    (folder / METADATA).write_bytes(build_metadata(specs, world))
    (folder / INDEX).write_bytes(encode(specs, world, container))
    return list_files(folder)


def blank() -> dict[str, Tensor]:
    return {key: torch.full_like(tensor, 1) for key, tensor in STATE.items()}


@pytest.mark.parametrize(
    "write",
    [
        write_ours,
        lambda folder: write_ours(folder, 1),
        lambda folder: write_ours(folder, None, 2),
    ],
    ids=["rows", "columns", "replicated"],
)
def test_every_bit_comes_back_and_little_is_read_besides(
    tmp_path: Path, write: Callable[[Path], Manifest]
) -> None:
    folder = tmp_path / "checkpoint"
    manifest, table = write(folder), blank()
    read = fill(table, folder, manifest, open_contents(folder, manifest))
    for key, tensor in STATE.items():
        assert torch.equal(table[key], tensor), key
    needed = sum(t.numel() * t.element_size() for t in STATE.values())
    blocks = len(list(folder.glob("*.distcp"))) * 4 * BLOCK_BYTES
    assert read.bytes <= needed + blocks


def test_a_flipped_bit_in_any_block_is_found_before_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    manifest = write_ours(folder)
    contents = open_contents(folder, manifest)
    rng = random.Random(1)
    for path in sorted(folder.glob("*.distcp")):
        content = path.read_bytes()
        for block in range(len(content) // BLOCK_BYTES):
            flipped = bytearray(content)
            at = block * BLOCK_BYTES + rng.randrange(BLOCK_BYTES)
            flipped[at] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            with pytest.raises(DataError, match=rf"{path.name}: block {block} \(from byte"):
                fill(blank(), folder, manifest, contents)
        path.write_bytes(content)


def test_what_follows_the_last_tensor_is_checked_too(tmp_path: Path) -> None:
    """The end of the last container, in a block of its own, and files without tensors."""
    room = BLOCK_BYTES - len(container("float32", (1,)).before)
    state = {"weights": torch.randn(room // 4 - 8)}
    specs = tensor_specs(state, 1)
    placed = place(specs, 0, container)
    image = FileBuffer(placed)
    image.views[0].copy_(state["weights"])
    (tmp_path / data_file(0)).write_bytes(image.content)
    (tmp_path / data_file(1)).write_bytes(b"")
    (tmp_path / METADATA).write_bytes(build_metadata(specs, 1))
    (tmp_path / INDEX).write_bytes(encode(specs, 1, container))
    manifest = list_files(tmp_path)
    table = {"weights": torch.zeros_like(state["weights"])}
    fill(table, tmp_path, manifest, open_contents(tmp_path, manifest))
    assert torch.equal(table["weights"], state["weights"])
    assert BLOCK_BYTES < manifest.files[data_file(0)].bytes < BLOCK_BYTES + 1000
    for name, words in (
        (data_file(0), f"{data_file(0)}: block 1 "),
        (METADATA, f"{METADATA}: checksum"),
        (INDEX, f"{INDEX}: checksum"),
        (data_file(1), f"{data_file(1)}: has 1 bytes"),
        ("sums-00001.json", f"{data_file(1)}: its block checksums, sums-00001.json: checksum"),
    ):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(flip_last(content))
        with pytest.raises(DataError, match=words):
            fill(table, tmp_path, manifest, open_contents(tmp_path, manifest))
        (tmp_path / name).write_bytes(content)


def test_ranks_share_what_no_tensor_is_read_from(tmp_path: Path) -> None:
    """`.metadata` and the files of four idle ranks: each is checked by one rank of three."""
    manifest = write_ours(tmp_path / "checkpoint", world=3)
    folder = tmp_path / "checkpoint"
    for rank in range(3, 7):
        (folder / data_file(rank)).write_bytes(b"")
    manifest = list_files(folder)
    (folder / MANIFEST).touch()  # or the whole folder would seem to be away
    for name in (METADATA, *map(data_file, range(3, 7))):
        hidden = folder / name
        hidden.rename(folder / "hidden")
        failed = [rank for rank in range(3) if not opens(folder, manifest, rank)]
        assert len(failed) == 1, name
        (folder / "hidden").rename(hidden)
    (folder / INDEX).unlink()
    assert not any(opens(folder, manifest, rank) for rank in range(3))


def opens(folder: Path, manifest: Manifest, rank: int) -> bool:
    try:
        open_contents(folder, manifest, rank, 3)
    except DataError:
        return False
    return True


def flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1]) if content else b"x"


def sums_of(path: Path) -> Path:
    return path.with_name("sums-00000.json")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
        (lambda path: sums_of(path).unlink(), "sums-00000.json: cannot be read"),
        (lambda path: sums_of(path).write_bytes(b"{}"), "sums-00000.json: has 2 bytes"),
        (lambda path: sums_of(path).write_bytes(flip_last(sums_of(path).read_bytes())), "checksum"),
    ],
)
def test_missing_and_cut_files_are_named(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "checkpoint"
    manifest = write_ours(folder)
    contents = open_contents(folder, manifest)
    (folder / MANIFEST).touch()  # or the whole folder would seem to be away
    damage(folder / data_file(0))
    with pytest.raises(DataError, match=words):
        fill(blank(), folder, manifest, contents)


class Changed:
    """Contents whose parts of the weights are other ones."""

    def __init__(self, contents: Contents, change: Callable[[list[Part]], list[Part]]) -> None:
        self.tensors, self._contents, self._change = contents.tensors, contents, change

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> list[Part]:
        found = list(self._contents.parts(key, offsets, sizes))
        return self._change(found) if key == "weights" else found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: parts[1:], "weights: the checkpoint does not contain every element"),
        (lambda parts: [replace(p, length=p.length - 1000) for p in parts], "too small for it"),
        (lambda parts: [replace(p, file="other") for p in parts], "other is not in the manifest"),
        (lambda parts: [replace(p, start=p.start + 64) for p in parts], "no tensor at byte"),
    ],
)
def test_an_index_that_is_wrong_about_a_part_is_refused(
    tmp_path: Path, change: Callable[[list[Part]], list[Part]], words: str
) -> None:
    folder = tmp_path / "checkpoint"
    manifest = write_ours(folder)
    contents = Changed(open_contents(folder, manifest), change)
    with pytest.raises(DataError, match=words):
        fill(blank(), folder, manifest, contents)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"half": torch.zeros(5, 3, 2)}, "half is torch.float32, the checkpoint's is"),
        ({"ids": torch.arange(12)}, "ids has shape"),
        ({"new": torch.zeros(1)}, "new is missing in the checkpoint"),
    ],
)
def test_other_tensors_than_the_checkpoint_s_are_named(
    change: dict[str, Tensor], words: str
) -> None:
    contents = CompactIndex(tensor_specs(STATE, 1), 1, container)
    check_shapes(STATE, contents)
    with pytest.raises(MismatchError, match=words):
        check_shapes({**STATE, **change}, contents)


@pytest.mark.parametrize("name", [INDEX, METADATA])
def test_what_the_manifest_does_not_mean_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    manifest = write_ours(folder)
    write_ours(tmp_path / "another", world=2)
    (folder / name).write_bytes((tmp_path / "another" / name).read_bytes())
    with pytest.raises(DataError, match=name):
        open_contents(folder, manifest)


def test_without_an_index_it_is_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    manifest = write_ours(folder)
    files = {name: entry for name, entry in manifest.files.items() if name != INDEX}
    with pytest.raises(DataError, match=f"{INDEX}: is not in the manifest"):
        open_contents(folder, replace(manifest, files=files))
