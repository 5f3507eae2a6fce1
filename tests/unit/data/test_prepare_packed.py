"""Packed files and parquet are read as streams; what is damaged or missing is one sentence."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_prepare import encoded, stream

from kempner.data.prepare import sources
from kempner.data.prepare.pipeline import prepare
from kempner.run.process.exit_codes import DataError, RunError, UsageError

TEXTS = [f"text number {number}" for number in range(400)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zstandard(content: bytes) -> bytes:
    """In two frames."""
    package = pytest.importorskip("zstandard")
    half = len(content) // 2
    parts = (content[:half], content[half:])
    return b"".join(package.ZstdCompressor().compress(part) for part in parts)


def write_parquet(path: Path, texts: list[str | None], rows: int = 50, **options: object) -> Path:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"id": range(len(texts)), "text": texts})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=rows, **options)
    return path


PACKINGS = {".gz": gzip.compress, ".zst": zstandard}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_files_are_unpacked_on_the_way(tmp_path: Path, packing: str) -> None:
    pack: Callable[[bytes], bytes] = PACKINGS[packing]
    (tmp_path / f"a.jsonl{packing}").write_bytes(pack(LINES))
    (tmp_path / f"b.txt{packing}").write_bytes(pack(b"\xef\xbb\xbftext"))
    told: list[tuple[int, int]] = []
    prepared = prepare(tmp_path / "out", [tmp_path], on_progress=lambda *at: told.append(at))
    assert stream(tmp_path / "out") == encoded(*map(str.encode, TEXTS), b"text")
    assert told[-1][0] == told[-1][1] == sum(file.size for file in prepared.found.files)
    assert prepare(tmp_path / "out", [tmp_path]).was_finished


@pytest.mark.parametrize("damage", ["cut off", "flipped"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_damaged_packed_file_is_one_sentence(tmp_path: Path, packing: str, damage: str) -> None:
    content = bytearray(PACKINGS[packing](LINES))
    if damage == "cut off":
        del content[-10:]
    else:
        content[len(content) // 2] ^= 0xFF
    (tmp_path / f"a.jsonl{packing}").write_bytes(content)
    with pytest.raises(RunError, match=r"a\.jsonl\.\w+ cannot be unpacked: it is damaged, cut off"):
        prepare(tmp_path / "out", [tmp_path / f"a.jsonl{packing}"])
    assert not list((tmp_path / "out").glob("*.tokens"))


def test_the_rows_of_parquet_are_documents_cut_by_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_UNIT", 1500)
    file = write_parquet(tmp_path / "a.parquet", [*TEXTS, ""])
    index = prepare(tmp_path / "out", [file]).index
    assert stream(tmp_path / "out") == encoded(*map(str.encode, TEXTS))
    assert len(index.shards) > 3
    assert sum(shard.empty_documents for shard in index.shards) == 1
    assert prepare(tmp_path / "out", [file]).was_finished


def test_a_column_is_named_and_must_hold_text(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", ["x"])
    with pytest.raises(UsageError, match=r'no column "body" \(it has: id, text\); see --text-key'):
        prepare(tmp_path / "out", [file], text_key="body")
    with pytest.raises(UsageError, match=r'column "id" of .*a\.parquet holds int64, not text'):
        prepare(tmp_path / "out", [file], text_key="id")


def test_bad_rows_are_counted_and_named(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", ["x", None, "y"])
    with pytest.raises(DataError, match=r'a\.parquet, row 2: the value of "text" is null; 1 of 3'):
        prepare(tmp_path / "out", [file])
    index = prepare(tmp_path / "out", [file], max_bad_share=0.5).index
    assert stream(tmp_path / "out") == encoded(b"x", b"y")
    assert index.shards[0].bad_lines == 1


def test_a_damaged_parquet_file_is_one_sentence(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", list(TEXTS))
    content = file.read_bytes()
    file.write_bytes(content[:-20])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read: it is damaged, or not"):
        prepare(tmp_path / "out", [file])


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_missing_package_is_named(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd")
    for package in ("zstandard", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"{name} needs the package \w+: pip install 'kempner\["):
        prepare(tmp_path / "out", [tmp_path / name])
