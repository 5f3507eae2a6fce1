"""Tokenizers: plain bytes, or any `tokenizer.json` of the Hugging Face tokenizers library."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers

from kempner.data.files.chat_template import ChatTemplate
from kempner.data.files.index import Dtype, TokenizerIdentity
from kempner.data.prepare.long_text import Ids
from kempner.run.process.exit_codes import DataError, UsageError

BYTE = "byte"
_BYTE_EOT = 256
_USUAL_EOT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "[EOS]")


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer as a value, so that worker processes use exactly the one that was asked for."""

    identity: TokenizerIdentity
    vocab_size: int  # one more than the largest token
    eot: int
    definition: str = ""  # content of the tokenizer.json; empty for bytes
    name: str = ""  # that file with the folder that it was in; empty for bytes

    @property
    def dtype(self) -> Dtype:
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def splits_anywhere(self) -> bool:
        """Whether a text may be cut at any byte without changing its tokens."""
        return self.identity.kind == "byte"

    def ids(self) -> Ids:
        """The function that encodes a text; a tokenizer.json is read for it."""
        if self.splits_anywhere:
            return lambda text: list(text.encode())
        return _hugging_face_ids(self.definition)


def find_tokenizer(name: str, eot: str | None = None) -> TokenizerSpec:
    """The tokenizer called `byte`, or the one in the tokenizer.json at the path `name`. `eot` is
    the text of the token that ends a document; one of the usual ones when left out. Raises
    UsageError if there is no such file or token, DataError if it is no tokenizer."""
    if name != BYTE:
        return _from_file(Path(name), eot)
    if eot is not None:
        raise UsageError(f"--eot {eot} needs a tokenizer.json; the byte tokenizer ends with 256")
    identity = TokenizerIdentity(kind="byte", fingerprint="byte-1")
    return TokenizerSpec(identity, vocab_size=_BYTE_EOT + 1, eot=_BYTE_EOT)


def find_chat_tokenizer(name: str, eot: str | None = None) -> tuple[TokenizerSpec, ChatTemplate]:
    """The tokenizer in a folder, or in the tokenizer.json at a path, and the chat template beside
    it. The token that ends an answer fills rows up, unless `eot` names another. Raises as
    `find_tokenizer` and `ChatTemplate.beside`."""
    if name == BYTE:
        raise UsageError("chats need --tokenizer PATH, a folder with a tokenizer and its template")
    template = ChatTemplate.beside(Path(name))
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    tokenizer = _from_file(path, eot or template.end or None)
    return tokenizer, replace(template, definition=tokenizer.definition)


def _hugging_face_ids(definition: str) -> Ids:
    # The library's own threads would compete with the worker processes for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = tokenizers.Tokenizer.from_str(definition)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # Text that spells a special token stays text: only the end of a document is an end.
    tokenizer.encode_special_tokens = True

    def ids(text: str) -> list[int]:
        # The call for batches can do without the place of each token in the text.
        encoded: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return encoded

    return ids


def _from_file(path: Path, eot: str | None) -> TokenizerSpec:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"tokenizer {path} cannot be read: {error.strerror}; "
            f"name a tokenizer.json or the word {BYTE}"
        ) from error
    vocabulary = _vocabulary(path, content)
    identity = TokenizerIdentity(
        kind="huggingface", fingerprint=hashlib.sha256(content).hexdigest()
    )
    size = max(vocabulary.values()) + 1
    name = "/".join(path.absolute().parts[-2:])
    return TokenizerSpec(identity, size, _find_eot(path, vocabulary, eot), content.decode(), name)


def _vocabulary(path: Path, content: bytes) -> dict[str, int]:
    try:
        vocabulary: dict[str, int] = tokenizers.Tokenizer.from_str(content.decode()).get_vocab()
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, UnicodeDecodeError):
            raise  # the library raises the bare class for a definition that it refuses
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error
    if not vocabulary:
        raise DataError(f"{path} has an empty vocabulary")
    return vocabulary


def _find_eot(path: Path, vocabulary: dict[str, int], eot: str | None) -> int:
    if eot is not None and eot not in vocabulary:
        raise UsageError(f"--eot {eot} is not a token of {path}")
    names = _USUAL_EOT if eot is None else (eot,)
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    raise UsageError(
        f"{path} has none of the usual end-of-document tokens ({', '.join(_USUAL_EOT)}): "
        "name the one it uses with --eot TOKEN"
    )
