"""A checkpoint is data: nothing in it runs."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from kempner.checkpoint.convert.import_dcp import RestrictedReader
from kempner.run.process.exit_codes import DataError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)
    state = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in dtypes}
    dcp.save({**state, "scalar": torch.tensor(4.0)}, checkpoint_id=path, no_dist=True)
    return path


def test_what_dcp_writes_is_read_as_the_stock_reader_does(checkpoint: Path) -> None:
    ours = RestrictedReader(checkpoint).read_metadata()
    stock = FileSystemReader(checkpoint).read_metadata()
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.storage_data == stock.storage_data


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_python_3_11_2_has_written_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    """Its enumerations are pickled as `getattr(CLASS, NAME)`."""
    stock = FileSystemReader(checkpoint).read_metadata()
    by_name = lambda member, _: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(stock, protocol))
    assert RestrictedReader(checkpoint).read_metadata().storage_data == stock.storage_data


class Runs:
    """Pickles as a call of its function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "executed"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_metadata_runs_nothing(checkpoint: Path, mark: Path, protocol: int) -> None:
    for attack in (
        Runs(os.mkdir, str(mark)),
        Runs(eval, f"__import__('os').mkdir({str(mark)!r})"),
        Runs(exec, f"import os; os.mkdir({str(mark)!r})"),
        Runs(getattr, "text", "upper"),
        Runs(getattr, _MEM_FORMAT_ENCODING, "mro"),
        Runs(getattr, Metadata, "__init__"),
        Runs(torch.load, str(mark)),
        Metadata({"x": Runs(os.mkdir, str(mark))}),  # type: ignore[dict-item]
    ):
        content = pickle.dumps(attack, protocol)
        (checkpoint / ".metadata").write_bytes(content)
        with pytest.raises(DataError, match="is not allowed there"):
            RestrictedReader(checkpoint).read_metadata()
        assert not mark.exists()
    with pytest.raises(FileNotFoundError):
        pickle.loads(pickle.dumps(Runs(os.stat, str(mark)), protocol))  # it would have run


def test_a_hostile_data_file_runs_nothing(checkpoint: Path, mark: Path) -> None:
    metadata = RestrictedReader(checkpoint).read_metadata()
    (info,) = {entry.relative_path for entry in metadata.storage_data.values()}
    data = checkpoint / info
    attack = io.BytesIO()
    torch.save(Runs(os.mkdir, str(mark)), attack)
    content = attack.getvalue()
    for entry in metadata.storage_data.values():
        entry.offset, entry.length = 0, len(content)
    data.write_bytes(content)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(dcp.api.CheckpointException, match="Weights only load failed"):
        load({"scalar": torch.zeros(())}, storage_reader=RestrictedReader(checkpoint), no_dist=True)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x05", b"no pickle", pickle.dumps({"a": 1}), b"\0" * 64]
)
def test_no_description_of_a_checkpoint(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(DataError, match="is refused"):
        RestrictedReader(checkpoint).read_metadata()
