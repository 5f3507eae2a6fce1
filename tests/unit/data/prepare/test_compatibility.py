"""Held-out data that does not fit the training data is told in one clause, and a tokenizer kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_tokenizers import save_tokenizer

from kempner.data.files.index import Index, check_compatible, tokenizer_file
from kempner.data.prepare.pipeline import prepare
from kempner.run.process.exit_codes import DataError


def prepared(folder: Path, tokenizer: Path | str, eot: str | None = None) -> Index:
    folder.mkdir()
    (folder / "a.txt").write_text("one two three")
    out, text = folder / "out", folder / "a.txt"
    return prepare(out, [text], tokenizer=str(tokenizer), eot=eot).index


def test_the_tokenizer_is_kept_beside_its_tokens(tmp_path: Path) -> None:
    original = save_tokenizer(tmp_path / "tokenizer.json")
    index = prepared(tmp_path / "a", original)
    assert index.tokenizer_name == f"{tmp_path.name}/tokenizer.json"
    copy = tokenizer_file(tmp_path / "a" / "out")
    assert copy is not None
    assert copy.read_bytes() == original.read_bytes()
    copy.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not the tokenizer that made"):
        tokenizer_file(tmp_path / "a" / "out")
    copy.unlink()  # as in a directory that an earlier version made
    assert tokenizer_file(tmp_path / "a" / "out") is None


def test_bytes_have_no_tokenizer_file(tmp_path: Path) -> None:
    prepared(tmp_path / "a", "byte")
    (tmp_path / "a" / "out" / "tokenizer.json").write_text("{}")  # of an attempt with another one
    assert tokenizer_file(tmp_path / "a" / "out") is None


def test_held_out_data_must_fit_the_training_data(tmp_path: Path) -> None:
    first = save_tokenizer(tmp_path / "first.json")
    train = prepared(tmp_path / "train", first)
    # Moved and renamed it is the same tokenizer.
    assert (
        check_compatible(train, prepared(tmp_path / "same", first.rename(tmp_path / "x.json")), 3)
        is None
    )
    other = save_tokenizer(tmp_path / "other.json", largest=12)
    refusal = check_compatible(train, prepared(tmp_path / "other", other), 3)
    assert refusal is not None
    assert "another tokenizer" in refusal
    assert "/other.json, SHA-256" in refusal
    refusal = check_compatible(train, prepared(tmp_path / "bytes", "byte"), 3)
    assert refusal is not None
    assert "another tokenizer (byte)" in refusal
    refusal = check_compatible(
        train, prepared(tmp_path / "eot", tmp_path / "x.json", eot="[BOS]"), 3
    )
    assert refusal is not None
    assert "the same --eot" in refusal


def test_held_out_data_must_hold_a_sample(tmp_path: Path) -> None:
    index = prepared(tmp_path / "a", "byte")
    assert check_compatible(index, index, index.tokens - 1) is None
    refusal = check_compatible(index, index, index.tokens)
    assert refusal is not None
    assert refusal.startswith(f"it holds {index.tokens} tokens, fewer than the {index.tokens + 1}")
