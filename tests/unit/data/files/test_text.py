"""Text to ids and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.data.files.text import TextTokenizer
from kempner.data.prepare.pipeline import prepare


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    (tmp_path / "a.txt").write_text("text")
    prepare(tmp_path / "data", [tmp_path / "a.txt"])
    return TextTokenizer.of(tmp_path / "data")


def test_a_byte_is_its_own_id(tokenizer: TextTokenizer) -> None:
    text = "".join(chr(c) for c in range(0x3000) if not 0xD800 <= c < 0xE000) + "😀<|endoftext|>"
    assert tokenizer.encode(text) == list(text.encode())
    assert (tokenizer.eot, tokenizer.vocab_size) == (256, 257)


def test_a_character_appears_when_its_last_byte_has_come(tokenizer: TextTokenizer) -> None:
    decoder = tokenizer.decoder(tokenizer.encode("Gru"))
    assert [decoder.add(byte) for byte in "ß é".encode()] == ["", "ß", " ", "", "é"]
    assert decoder.rest() == ""


def test_bytes_that_are_no_character_are_not_lost(tokenizer: TextTokenizer) -> None:
    decoder = tokenizer.decoder(tokenizer.encode("x"))
    content = b"a\xffb\xe2\x82"
    pieces = "".join(decoder.add(byte) for byte in content)
    assert pieces + decoder.rest() == content.decode("utf-8", "replace")
    assert pieces != content.decode("utf-8", "replace")
