"""Text to token ids and back, with the tokenizer that made the tokens of a prepared directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kempner.data.files.chat_template import ChatTemplate, chat_template
from kempner.data.files.index import TOKENIZER_FILE, read_index, tokenizer_file
from kempner.run.process.exit_codes import DataError

_END_OF_DOCUMENT = "<|endoftext|>"
"""How the byte tokenizer's 256 is spelt where a tokenizer.json must name it."""


@dataclass(frozen=True)
class TextTokenizer:
    """The tokenizer of a prepared directory; that of bytes as one of the tokenizers library.
    `definition` is its tokenizer.json, `eot` the token that follows every document, `vocab_size`
    one more than the largest token, `chat` the template of chats; None of text."""

    definition: str
    eot: int
    vocab_size: int
    chat: ChatTemplate | None = None

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Raises `DataError` if the directory is not prepared data, or keeps no tokenizer."""
        index = read_index(folder)
        if index.tokenizer.kind == "byte":
            return cls(_byte_definition(), index.eot, index.vocab_size)
        path = tokenizer_file(folder)
        if path is None:
            raise DataError(
                f"{folder} keeps no {TOKENIZER_FILE}, since an older kempner prepared it: copy "
                "the one that it was prepared with into it"
            )
        definition = path.read_text(encoding="utf-8")
        chat = chat_template(folder, index, definition) if index.template else None
        return cls(definition, index.eot, index.vocab_size, chat)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, as `kempner prepare` makes them: no special token is in them."""
        plain = self._open()
        plain.no_padding()
        plain.no_truncation()
        plain.encode_special_tokens = True  # a text that spells one stays text
        ids: list[int] = plain.encode(text, add_special_tokens=False).ids
        return ids

    def decoder(self, before: Sequence[int]) -> StreamDecoder:
        return StreamDecoder(self._open(), before)

    def hugging_face_files(self, longest: int) -> dict[str, bytes]:
        """The files from which `AutoTokenizer` makes this tokenizer, by name. Every id is as
        `encode` gives it: a tokenizer that puts special tokens around a text loses that habit,
        since the model has never seen them there. `longest` is the number of tokens that the model
        was trained with at once."""
        tokenizer = self._open()
        end = tokenizer.id_to_token(self.eot)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
        }
        if self.chat is not None:
            config |= json.loads(self.chat.settings)
        definition = json.loads(self.definition)
        definition |= {"truncation": None, "padding": None}
        if tokenizer.num_special_tokens_to_add(is_pair=False):
            definition["post_processor"] = None
        return {
            "tokenizer.json": json.dumps(definition, ensure_ascii=False).encode(),
            "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
        }

    def _open(self) -> Tokenizer:
        return Tokenizer.from_str(self.definition)


class StreamDecoder:
    """Text from ids that come one at a time; the bytes of a character are held until it is whole.
    What stands `before` them, ids as well, decides about a space in between."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._text = tokenizer.decode(self._ids, skip_special_tokens=False)
        self._stream = decoders.DecodeStream(ids=self._ids, skip_special_tokens=False)

    def add(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self._ids.append(token)
        more = self._stream.step(self._tokenizer, token) or ""
        self._text += more
        return more

    def rest(self) -> str:
        """What was held and will not be completed any more."""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""


def _byte_definition() -> str:
    """A tokenizer.json whose ids are bytes, and 256 the end of a document."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END_OF_DOCUMENT])
    definition: str = tokenizer.to_str()
    return definition


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies, since GPT-2. A byte that
    is a visible character of Latin-1 is itself, the others are U+0100 and what follows."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
