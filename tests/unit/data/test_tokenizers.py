"""Any tokenizer.json turns text into tokens; the end of a document is one token and no other."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from kempner.data.files.token_file import Corpus
from kempner.data.prepare.pipeline import prepare
from kempner.data.prepare.tokenizers import find_tokenizer
from kempner.run.process.exit_codes import DataError, UsageError

END = "<|endoftext|>"


def save_tokenizer(path: Path, end: str = END, largest: int = 9) -> Path:
    """Knows three words and the parts of `<|endoftext|>`; pads, truncates and adds a start."""
    vocabulary = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "<|": 4, "endoftext": 5, "|>": 6}
    tokenizer = Tokenizer(WordLevel({**vocabulary, "[BOS]": 7, "last": largest}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([end, "[BOS]"])
    tokenizer.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 7)])
    tokenizer.enable_padding(length=8, pad_id=0)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_is_used_for_its_tokens_only(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text(f"one two three {END} one")
    (tmp_path / "b.txt").write_text("two")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    index = prepare(tmp_path / "out", files, tokenizer=str(path)).index
    end = Tokenizer.from_file(str(path)).token_to_id(END)
    tokens = Corpus.open(tmp_path / "out").read(0, index.tokens).tolist()
    assert tokens == [1, 2, 3, 4, 5, 6, 1, end, 2, end]
    assert (index.eot, index.dtype, index.vocab_size - 1) == (end, "uint16", end)
    assert index.tokenizer.kind == "huggingface"
    assert index.tokenizer.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, "uint16"), (65_536, "uint32")])
def test_the_type_is_the_narrowest_that_holds_every_token(
    tmp_path: Path, largest: int, dtype: str
) -> None:
    # The numbers between are not taken: counting the vocabulary would come to another type.
    path = save_tokenizer(tmp_path / "tokenizer.json", largest=largest)
    assert find_tokenizer(str(path)).vocab_size == largest + 1
    (tmp_path / "a.txt").write_text("last one")
    index = prepare(tmp_path / "out", [tmp_path / "a.txt"], tokenizer=str(path)).index
    assert index.dtype == dtype
    assert Corpus.open(tmp_path / "out").read(0, 2).tolist() == [largest, 1]


def test_the_token_for_the_end_can_be_named(tmp_path: Path) -> None:
    path = str(save_tokenizer(tmp_path / "tokenizer.json", end="<fin>"))
    with pytest.raises(UsageError, match=r"none of the usual end-of-document tokens.*--eot TOKEN"):
        find_tokenizer(path)
    expected = Tokenizer.from_file(path).token_to_id("<fin>")
    assert find_tokenizer(path, eot="<fin>").eot == expected
    with pytest.raises(UsageError, match=r"--eot <end> is not a token of .*tokenizer\.json"):
        find_tokenizer(path, eot="<end>")


def test_bytes_have_their_own_end() -> None:
    with pytest.raises(UsageError, match=r"--eot <end> needs a tokenizer\.json"):
        find_tokenizer("byte", eot="<end>")


@pytest.mark.parametrize(
    "content", [b"not JSON", b"{}", b"\xff\xfe", b'{"model": {"type": "Unheard"}}']
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json: "):
        find_tokenizer(str(path))


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"bytes cannot be read: No such file.*the word byte"):
        find_tokenizer(str(tmp_path / "bytes"))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_bytes(b"one \xff two")
    with pytest.raises(
        DataError, match=r"a\.txt:1: the line is not UTF-8 \(at its byte 5\).*--tokenizer byte"
    ):
        prepare(tmp_path / "out", [tmp_path / "a.txt"], tokenizer=str(path))


def test_another_tokenizer_does_not_go_into_a_finished_directory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    prepare(tmp_path / "out", [tmp_path / "a.txt"])
    path = save_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UsageError, match=r"with another tokenizer \(byte, eot=256\)"):
        prepare(tmp_path / "out", [tmp_path / "a.txt"], tokenizer=str(path))


def test_what_another_tokenizer_began_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    path = str(save_tokenizer(tmp_path / "tokenizer.json"))

    def stop(done: int, total: int) -> None:
        if (tmp_path / "out" / ".progress" / "shard-00000.json").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "out", [tmp_path / "a.txt"], on_progress=stop)
    prepared = prepare(tmp_path / "out", [tmp_path / "a.txt"], tokenizer=path)
    assert prepared.kept == 0
    assert Corpus.open(tmp_path / "out").read(0, 1).tolist() == [1]
