"""The bytes of its tokens are those of a text, for any text; or they are not known."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tokenizers import save_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kempner.data.files.text import TextTokenizer
from kempner.data.files.token_bytes import token_bytes
from kempner.data.prepare.pipeline import prepare

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich, 日本語も。 \n" * 9


def byte_level(path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("größer", normalized=False)])
    tokenizer.save(str(path))
    return path


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(codec="utf-8")) | st.text("abgrößer über\n"))
def test_they_add_up_to_the_text(tmp_path: Path, text: str) -> None:
    for name in ("byte", "pieces"):
        folder = tmp_path / name
        if not folder.exists():
            (tmp_path / "a.txt").write_text(TEXT)
            chosen = "byte" if name == "byte" else str(byte_level(tmp_path / "t.json"))
            prepare(folder, [tmp_path / "a.txt"], tokenizer=chosen)
        sizes, tokenizer = token_bytes(folder), TextTokenizer.of(folder)
        assert sizes is not None
        assert len(sizes) == tokenizer.vocab_size
        assert sum(sizes[token] for token in tokenizer.encode(text)) == len(text.encode())
        assert sizes[tokenizer.eot] == 0


def test_of_other_tokenizers_they_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    tokenizer = str(save_tokenizer(tmp_path / "tokenizer.json"))
    prepare(tmp_path / "out", [tmp_path / "a.txt"], tokenizer=tokenizer)
    assert token_bytes(tmp_path / "out") is None
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert token_bytes(tmp_path / "out") is None
