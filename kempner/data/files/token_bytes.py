"""How many bytes of text each token stands for: what makes losses of different tokenizers alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import from_json

from kempner.data.files.index import read_index, tokenizer_file
from kempner.run.process.exit_codes import DataError


def token_bytes(folder: Path) -> list[int] | None:
    """Bytes by token id [vocab_size] for the tokenizer of a prepared directory; 0 for a token that
    is no text, as the end of a document. Of other tokenizers than those of bytes and of byte-level
    pieces (GPT-2, Llama 3, Qwen) they are not known: None. Raises `DataError` as
    `tokenizer_file`, and if it cannot be read."""
    index = read_index(folder)
    if index.tokenizer.kind == "byte":
        return [int(token != index.eot) for token in range(index.vocab_size)]
    path = tokenizer_file(folder)
    if path is None:
        return None
    try:
        sizes = _byte_level(from_json(path.read_bytes()))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # of another form than that of the tokenizers library
    return None if sizes is None else [sizes.get(token, 0) for token in range(index.vocab_size)]


def _byte_level(definition: dict[str, Any]) -> dict[int, int] | None:
    """Bytes by token id; None if a character of a piece is not always one byte."""
    model, decoder = definition["model"], definition["decoder"] or {}
    if model["type"] != "BPE" or model.get("unk_token") or decoder.get("type") != "ByteLevel":
        return None
    # Each byte is written as one character: https://github.com/openai/gpt-2, encoder.py.
    sizes = {token: len(piece) for piece, token in model["vocab"].items()}
    for added in definition.get("added_tokens") or []:
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return sizes
