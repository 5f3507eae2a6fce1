"""Token files are read where they are, checked against their index, and never guessed at."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from harness import write_tokens
from hypothesis import given
from hypothesis import strategies as st

from kempner.data.files import token_file
from kempner.data.files.index import INDEX_FILE, Index, fingerprint, read_index
from kempner.data.files.token_file import BEGINS, Corpus, TokenWriter, verify
from kempner.run.process.exit_codes import DataError

EOT = 256
SHARDS: tuple[list[int], ...] = (
    [1, 2, 3, 4, 5],
    [6],
    [],
    [7, 8, 9, 10, 11, 12, 13],
    [14, 15, 16, 17, 18, 19],
)


def write_corpus(
    directory: Path,
    shards: Sequence[Sequence[int]] = SHARDS,
    dtype: Any = "uint16",
    vocab_size: int = 257,
) -> Index:
    return write_tokens(directory, shards, dtype, vocab_size)


def edit_index(directory: Path, **changes: Any) -> None:
    path = directory / INDEX_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def open_files() -> set[str]:
    return {file.path for file in psutil.Process().open_files()}


@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 2**16 - 1), ("uint32", 2**32 - 1)])
def test_what_is_written_is_read(tmp_path: Path, dtype: str, largest: int) -> None:
    write_corpus(tmp_path, [[0, largest, 5], [7]], dtype, largest + 1)
    assert Corpus.open(tmp_path).read(0, 4).tolist() == [0, largest, 5, 7]


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    index = write_corpus(tmp_path, [[1, 2, 256]])
    content = (tmp_path / "part-0.tokens").read_bytes()
    assert content[:24] == b"KEMPTOK1" + struct.pack("<IIQ", 2, 0, 3)
    assert content[24:40].hex() == index.shards[0].checksum
    assert content[40:64] == bytes(24)
    assert content[64:] == struct.pack("<HHH", 1, 2, 256)


def test_a_token_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with (
        TokenWriter(tmp_path / "file", "uint16") as writer,
        pytest.raises(ValueError, match="65536 does not fit uint16"),
    ):
        writer.append(np.array([65_536]))


@given(st.lists(st.lists(st.sampled_from([1, 2, EOT]), max_size=6), min_size=1, max_size=4))
def test_the_documents_of_a_stretch_are_those_whose_tokens_it_has(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]]
) -> None:
    """Of text, which ends a document, and of chats, which flag the first token of one."""
    stream = list(chain(*shards))
    begins = [n for n, before in enumerate([EOT, *stream[:-1]][: len(stream)]) if before == EOT]
    flagged, tokens = [], iter(enumerate(stream))
    for shard in shards:
        flagged.append([t | BEGINS * (next(tokens)[0] in begins) for t in shard])
    folder = tmp_path_factory.mktemp("text")
    write_corpus(folder, shards, vocab_size=EOT + 1)
    text = Corpus.open(folder)
    folder = tmp_path_factory.mktemp("chats")
    index = write_corpus(folder, flagged, "uint32", EOT + 1)
    chats = Corpus(folder, index.model_copy(update={"kind": "chats"}))
    for start, stop in combinations(range(len(stream) + 1), 2):
        expected = [max(n for n in begins if n <= start), *(n for n in begins if start < n < stop)]
        for corpus in (text, chats):
            with patch.object(token_file, "_SEARCHED", 2):
                assert corpus.documents(start, stop - start) == expected


def test_every_stretch_reads_as_the_concatenation(tmp_path: Path) -> None:
    index = write_corpus(tmp_path)
    whole = [token for shard in SHARDS for token in shard]
    corpus = Corpus.open(tmp_path, max_open=1)
    for start in range(index.tokens + 1):
        for stop in range(start, index.tokens + 1):
            assert corpus.read(start, stop - start).tolist() == whole[start:stop]
    with pytest.raises(IndexError):
        corpus.read(index.tokens, 1)
    with pytest.raises(IndexError):
        corpus.read(-1, 1)


def test_samples_share_one_token_and_cross_shards(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    corpus = Corpus.open(tmp_path)
    assert corpus.samples(6) == 3
    assert [corpus.sample(i, 6).tolist() for i in range(3)] == [
        [1, 2, 3, 4, 5, 6, 7],
        [7, 8, 9, 10, 11, 12, 13],
        [13, 14, 15, 16, 17, 18, 19],
    ]


def test_too_small_a_corpus_says_what_to_do(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    corpus = Corpus.open(tmp_path)
    assert corpus.samples(18) == 1
    with pytest.raises(DataError, match=r"19 tokens.*20.*seq_len=19.*prepare more text or lower"):
        corpus.samples(19)


def test_few_files_are_open_at_once(tmp_path: Path) -> None:
    write_corpus(tmp_path, [[i, i] for i in range(20)])
    corpus = Corpus.open(tmp_path, max_open=3)
    before = open_files()
    for start in (0, 10, 20, 30, 0, 38):
        corpus.read(start, 2)
    opened = {Path(name).name for name in open_files() - before}
    assert opened == {"part-0.tokens", "part-15.tokens", "part-19.tokens"}
    corpus.close()
    assert open_files() == before
    assert corpus.read(0, 2).tolist() == [0, 0]


def test_a_corpus_travels_without_its_open_files(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    corpus = Corpus.open(tmp_path, max_open=7)
    corpus.read(0, 5)
    copy = pickle.loads(pickle.dumps(corpus))
    corpus.close()
    assert copy.max_open == 7
    assert copy.read(0, 5).tolist() == [1, 2, 3, 4, 5]


def test_a_short_read_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path)
    whole = os.preadv
    calls = []

    def stingy(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        return whole(descriptor, [buffers[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    assert Corpus.open(tmp_path).read(6, 7).tolist() == [7, 8, 9, 10, 11, 12, 13]
    assert len(calls) == 22 + 5  # a header of 64 bytes and 14 more, three at a time


def truncate(directory: Path) -> None:
    os.truncate(directory / "part-0.tokens", 64 + 8)


def truncate_header(directory: Path) -> None:
    os.truncate(directory / "part-0.tokens", 10)


def extend(directory: Path) -> None:
    with open(directory / "part-0.tokens", "ab") as file:
        file.write(b"\0\0")


def remove(directory: Path) -> None:
    (directory / "part-0.tokens").unlink()


def make_foreign(directory: Path) -> None:
    (directory / "part-0.tokens").write_bytes(np.arange(37, dtype=np.uint16).tobytes())


def call_it_uint32(directory: Path) -> None:
    edit_index(directory, dtype="uint32")


def swap_equals(directory: Path) -> None:
    shutil.copy(directory / "part-1.tokens", directory / "part-0.tokens")


def swap_others(directory: Path) -> None:
    shutil.copy(directory / "part-2.tokens", directory / "part-0.tokens")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (truncate, r"72 bytes, the index says 74"),
        (truncate_header, r"10 bytes, the index says 74"),
        (extend, r"76 bytes, the index says 74"),
        (remove, r"cannot be read: No such file or directory"),
        (make_foreign, r"starts with b'.*', a token file starts with b'KEMPTOK1'"),
        (call_it_uint32, r"holds uint16 tokens, the index says uint32"),
        (swap_equals, r"checksum is [0-9a-f]{32}, the index says [0-9a-f]{32}"),
        (swap_others, r"holds 3 tokens, the index says 5"),
    ],
)
def test_a_file_that_is_not_the_indexed_one_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], complaint: str
) -> None:
    write_corpus(tmp_path, [[1, 2, 3, 4, 5], [9, 9, 9, 9, 9], [1, 2, 3]])
    damage(tmp_path)
    for use in (lambda: Corpus.open(tmp_path).read(0, 2), lambda: verify(tmp_path)):
        with pytest.raises(DataError, match=complaint) as error:
            use()
        assert str(tmp_path / "part-0.tokens") in str(error.value)


def test_refused_files_are_closed(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    call_it_uint32(tmp_path)
    before = open_files()
    with pytest.raises(DataError):
        Corpus.open(tmp_path).read(0, 2)
    assert open_files() == before


def test_truncation_while_in_use_is_an_error(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    corpus = Corpus.open(tmp_path)
    corpus.read(0, 1)
    os.truncate(tmp_path / "part-0.tokens", 70)
    with pytest.raises(DataError, match=r"truncated while in use.*byte 70"):
        corpus.read(0, 5)


def test_verification_finds_a_flipped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "_BLOCK", 4)
    index = write_corpus(tmp_path)
    assert verify(tmp_path) == index
    path = tmp_path / "part-4.tokens"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"part-4\.tokens is damaged"):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": 20}, "tokens is 20, but its shards hold 19"),
        ({"documents": 1}, "documents is 1, but its shards hold 5"),
        ({"eot": 257}, "eot=257 is not below vocab_size=257"),
        ({"version": 2}, "version: Input should be 1"),
        ({"format": "other"}, "format: "),
        ({"dtype": "int8"}, "dtype: "),
        ({"shards": []}, "shards: "),
        ({"surplus": 1}, "surplus: "),
        ({"vocab_size": "257"}, "vocab_size: "),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    write_corpus(tmp_path)
    edit_index(tmp_path, **changes)
    with pytest.raises(DataError, match=complaint) as error:
        read_index(tmp_path)
    assert str(tmp_path / INDEX_FILE) in str(error.value)


def test_a_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    index = write_corpus(tmp_path)
    first = index.shards[0].model_dump() | {"file": "../part-0.tokens"}
    edit_index(tmp_path, shards=[first, *[shard.model_dump() for shard in index.shards[1:]]])
    with pytest.raises(DataError, match=r"shards\[0\]\.file"):
        read_index(tmp_path)


def test_a_torn_index_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    path = tmp_path / INDEX_FILE
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="Invalid JSON"):
        read_index(tmp_path)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_no_prepared_data_says_how_to_make_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(DataError, match=rf"{name} is not prepared data.*kempner prepare --out"):
        Corpus.open(tmp_path / name)


def test_the_fingerprint_covers_content_order_and_length(tmp_path: Path) -> None:
    base = fingerprint(write_corpus(tmp_path / "a"), 6)
    assert base == fingerprint(write_corpus(tmp_path / "b"), 6)
    others = [
        fingerprint(write_corpus(tmp_path / "c"), 7),
        fingerprint(write_corpus(tmp_path / "d", SHARDS[::-1]), 6),
        fingerprint(write_corpus(tmp_path / "e", [[2, *SHARDS[0][1:]], *SHARDS[1:]]), 6),
        fingerprint(write_corpus(tmp_path / "f", SHARDS, "uint32"), 6),
    ]
    assert len({base, *others}) == 5


def test_the_fingerprint_covers_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = write_corpus(tmp_path)
    before = fingerprint(index, 6)
    for name in ("files.index.WINDOW_VERSION", "order.shuffle.PERMUTATION_VERSION"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kempner.data.{name}", 2)
            assert fingerprint(index, 6) != before
