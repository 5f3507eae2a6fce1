"""A long text, encoded in blocks and cut over token files, has the tokens of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kempner.data.files.token_file import Corpus
from kempner.data.prepare import long_text, sources
from kempner.data.prepare.long_text import BlockEncoder
from kempner.data.prepare.pipeline import prepare
from kempner.data.prepare.tokenizers import find_tokenizer

END = "<|endoftext|>"
ROOT = Path(__file__).parents[3]

LLAMA_3 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt_2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def llama_3() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(LLAMA_3, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def llama_2() -> Tokenizer:
    """Without words: merges may go across spaces, and a text begins with one more."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


KINDS = {
    gpt_2: trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
    llama_3: trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
    llama_2: trainers.BpeTrainer(
        vocab_size=600, special_tokens=[END, "<unk>"], max_token_length=8, show_progress=False
    ),
    unigram: trainers.UnigramTrainer(
        vocab_size=800, special_tokens=[END, "<unk>"], unk_token="<unk>", show_progress=False
    ),
    bert: trainers.WordPieceTrainer(
        vocab_size=800, special_tokens=[END, "<unk>"], show_progress=False
    ),
}


def sample_text() -> str:
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/data.md")]
    code = Path(long_text.__file__).read_text()
    odd = "naïve e\u0301 \U0001f600\U0001f44d\U0001f3fd。漢字かな、\r\n\r\n\t \n\n\n  x   \n" * 40
    numbers = " ".join(str(7**n) for n in range(120))
    return "\n\n".join([*pages, odd, code, numbers, "one line without an end " * 300])


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def tokenizer_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: Callable[[], Tokenizer] = request.param
    tokenizer = make()
    text = sample_text()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), KINDS[make])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_blocks_and_token_files_do_not_show(
    tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_text, "BLOCK", 900)
    monkeypatch.setattr(long_text, "_WINDOW", 500)
    monkeypatch.setattr(sources, "_UNIT", 8000)
    monkeypatch.setattr(sources, "_WINDOW", 3000)
    (tmp_path / "a.txt").write_bytes(sample_text().encode())
    (tmp_path / "b.txt").write_text("short")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    index = prepare(tmp_path / "out", files, tokenizer=str(tokenizer_path)).index
    ids = find_tokenizer(str(tokenizer_path)).ids()
    expected = [*ids(sample_text()), index.eot, *ids("short"), index.eot]
    found = Corpus.open(tmp_path / "out").read(0, index.tokens).tolist()
    assert found == expected
    assert len(index.shards) > 2
    assert sum(shard.unproven_cuts for shard in index.shards) == 0


def test_a_text_without_a_good_cut_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "BLOCK", 900)
    monkeypatch.setattr(long_text, "_WINDOW", 500)

    def in_threes(text: str) -> list[int]:
        return [int(text[at : at + 3], 36) for at in range(0, len(text), 3)]

    encoder = BlockEncoder(in_threes)
    parts = [*encoder.feed(b"1234567" * 400), encoder.end()]
    assert encoder.unproven > 0
    assert np.concatenate(parts).size > 900


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    def ids(text: str) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return list(text.encode())

    encoder = BlockEncoder(ids)
    line = b"some words and more\n" * 5000
    tokens = sum(part.size for _ in range(30) for part in encoder.feed(line))
    tokens += encoder.end().size
    assert tokens == 30 * len(line)
    assert longest <= long_text.BLOCK + 2 * long_text.CONTEXT
