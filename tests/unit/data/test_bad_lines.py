"""Lines without text are left out and counted, up to a share; what comes twice is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_prepare import encoded, stream, tree, write_lines
from test_tokenizers import save_tokenizer

from kempner.data.prepare import documents, sources
from kempner.data.prepare.pipeline import prepare
from kempner.run.process.exit_codes import DataError, UsageError


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A thousand lines in several token files; the 400th and the last are bad."""
    monkeypatch.setattr(sources, "_UNIT", 5000)
    file = write_lines(tmp_path / "a.jsonl", *({"text": f"line {n}"} for n in range(1000)))
    lines = file.read_bytes().splitlines()
    lines[399], lines[999] = b'{"text": "\\ud800"}', b'{"text": "half'
    file.write_bytes(b"\n".join(lines))
    return file


def test_a_few_bad_lines_are_left_out_and_told(mixed: Path, tmp_path: Path) -> None:
    prepared = prepare(tmp_path / "out", [mixed], max_bad_share=0.002)
    good = [f"line {n}".encode() for n in range(1000) if n not in (399, 999)]
    assert stream(tmp_path / "out") == encoded(*good)
    assert sum(shard.bad_lines for shard in prepared.index.shards) == 2
    assert prepared.first_bad.startswith(f'{mixed}:400: "text" has half a surrogate pair')


def test_more_than_the_share_ends_it_and_what_was_made_is_kept(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:400: .*; 2 of 1,000 lines cannot be used, more"):
        prepare(tmp_path / "out", [mixed])
    assert not (tmp_path / "out" / "index.json").exists()
    again = prepare(tmp_path / "out", [mixed], max_bad_share=0.002)
    assert again.kept == len(again.index.shards) > 1
    assert "a.jsonl:400" in again.first_bad  # of a token file that was made before
    prepare(tmp_path / "whole", [mixed], max_bad_share=1)
    assert tree(tmp_path / "whole") == tree(tmp_path / "out")


def test_a_file_of_another_kind_is_refused_at_once(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *({"body": "x"} for _ in range(200)), {"text": "x"})
    with pytest.raises(DataError, match=r"a\.jsonl:100: .*no key .text.*; none of the 100 lines"):
        prepare(tmp_path / "out", [file], max_bad_share=1)


def test_a_huge_line_is_bad_and_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_LINE", 1000)
    huge = {"text": "x" * 500_000}
    file = write_lines(tmp_path / "a.jsonl", {"text": "a"}, huge, {"text": "b"}, huge)
    with pytest.raises(DataError, match=r"a\.jsonl:2: the document is longer than"):
        prepare(tmp_path / "out", [file])
    prepare(tmp_path / "out", [file], max_bad_share=0.5)
    assert stream(tmp_path / "out") == encoded(b"a", b"b")


def test_lines_of_a_text_that_are_not_utf8_are_bad(tmp_path: Path) -> None:
    tokenizer = str(save_tokenizer(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_bytes(b"one\n\xff two\nthree")
    prepared = prepare(tmp_path / "out", [tmp_path / "a.txt"], tokenizer=tokenizer, max_bad_share=1)
    assert stream(tmp_path / "out") == [1, 3, prepared.index.eot]
    assert "a.txt:2: the line is not UTF-8 (at its byte 1)" in prepared.first_bad


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    content = '{"text": "x"}' if name == "a.jsonl" else "x"
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    prepare(tmp_path / "out", [tmp_path / name])
    assert stream(tmp_path / "out") == encoded(b"x")


def test_a_file_that_comes_twice_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("x")
    with pytest.raises(UsageError, match=r"a\.txt comes twice: name every file once"):
        prepare(tmp_path / "out", [folder, folder / "a.txt"])
    os.link(folder / "a.txt", folder / "b.txt")
    with pytest.raises(UsageError, match=r"b\.txt comes twice, also as .*a\.txt"):
        prepare(tmp_path / "out", [folder])


def test_a_large_copy_is_told(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"some text\n" * 120_000)
    (tmp_path / "c.txt").write_bytes(b"some other" * 120_000)
    found = prepare(tmp_path / "out", [tmp_path / f"{name}.txt" for name in "abc"]).found
    assert found.twins == ((tmp_path / "a.txt", tmp_path / "b.txt"),)


def test_binary_files_in_a_folder_are_left_out_and_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "c.csv").write_text("text\nx")
    left_out = prepare(tmp_path / "out", [tmp_path]).found.left_out
    assert left_out == (tmp_path / "b.txt", tmp_path / "c.csv")
