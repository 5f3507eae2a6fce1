"""The file in memory is a file that the stock reader takes for its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from kempner.checkpoint.convert.import_dcp import RestrictedReader
from kempner.checkpoint.format.shard_plan import Placed, TensorSpec, chunk_of, data_file, place
from kempner.checkpoint.io.file_writer import write_stream
from kempner.checkpoint.tensors.dcp_metadata import build_metadata
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, tensor_specs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "weights": torch.randn(37, 11),
    "half": torch.randn(5, 3, 2).bfloat16(),
    "counter": torch.tensor(7.0),
    "ids": torch.arange(13),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
    "tiny": torch.randn(3).to(torch.float8_e4m3fn),
}


def write(folder: Path, world: int, placements: tuple[int | None, ...]) -> None:
    """Write STATE as `world` ranks would, all of it cut or held alike."""
    specs = [
        TensorSpec(
            key,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            (world,),
            placements if tensor.ndim else (None,),
        )
        for key, tensor in STATE.items()
    ]
    folder.mkdir()
    for rank in range(world):
        placed = place(specs, rank, container)
        image = FileBuffer(placed)
        for view, item in zip(image.views, placed, strict=True):
            view.copy_(part(item))
        write_stream(folder / data_file(rank), image.content)
    (folder / ".metadata").write_bytes(build_metadata(specs, world))


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def part(item: Placed) -> torch.Tensor:
    tensor = STATE[item.chunk.key]
    for dim, (offset, size) in enumerate(zip(item.chunk.offsets, item.chunk.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("placements", [(None,), (0,)])
@pytest.mark.parametrize("reader", [FileSystemReader, RestrictedReader])
def test_stock_load_gives_every_bit_back(
    tmp_path: Path, world: int, placements: tuple[int | None, ...], reader: type[FileSystemReader]
) -> None:
    write(tmp_path / "checkpoint", world, placements)
    loaded = {key: torch.full_like(tensor, 1) for key, tensor in STATE.items()}
    dcp.load(loaded, storage_reader=reader(tmp_path / "checkpoint"), no_dist=True)
    for key, tensor in STATE.items():
        assert torch.equal(octets(loaded[key]), octets(tensor)), key


def test_metadata_says_what_the_stock_writer_would(tmp_path: Path) -> None:
    write(tmp_path / "ours", 1, (None,))
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "stock", no_dist=True)
    ours = FileSystemReader(tmp_path / "ours").read_metadata()
    stock = FileSystemReader(tmp_path / "stock").read_metadata()
    for key, entry in stock.state_dict_metadata.items():
        mine = ours.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        assert isinstance(mine, TensorStorageMetadata)
        assert (mine.size, mine.properties.dtype) == (entry.size, entry.properties.dtype)
        assert mine.chunks == entry.chunks
    assert ours.planner_data == stock.planner_data
    assert ours.version == stock.version
    assert set(ours.storage_data) == set(stock.storage_data)


def test_views_are_staged_into_the_file_itself() -> None:
    specs = tensor_specs(STATE, 1)
    placed = place(specs, 0, container)
    image = FileBuffer(placed)
    before = bytes(image.content)
    for view in image.views:
        octets(view).fill_(255)
    after = bytes(image.content)
    changed = sum(a != b for a, b in zip(before, after, strict=True))
    assert changed == sum(item.container.data for item in placed)


def test_a_tensor_of_a_larger_world_is_written_by_one_rank() -> None:
    (spec,) = tensor_specs({"counter": torch.tensor(1.0)}, 4)
    assert sum(chunk_of(spec, rank) is not None for rank in range(4)) == 1
