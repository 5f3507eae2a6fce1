"""Which tokenizer made a prepared directory, and whether two of them fit together."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

from kempner.data.files.index import TOKENIZER_FILE, Index, read_index
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import read_filled, storage_waits


def tokenizer_file(folder: Path) -> Path | None:
    """The copy of the tokenizer.json that made the tokens of a prepared directory.

    None for bytes, and in a directory without a copy. Raises DataError if the copy is another
    tokenizer than the index says, and as `read_index`.
    """
    index, path = read_index(folder), folder / TOKENIZER_FILE
    if index.tokenizer.kind == "byte":
        return None
    try:
        content = storage_waits().retry(partial(read_filled, path), worked=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != index.tokenizer.fingerprint:
        raise DataError(
            f"{path} is not the tokenizer that made the tokens beside it: "
            "put the original back, or remove it"
        )
    return path


def check_compatible(train: Index, held_out: Index, seq_len: int) -> str | None:
    """Why a model trained on `train` cannot be evaluated on `held_out`, in one clause, or None."""
    if held_out.tokenizer != train.tokenizer:
        return (
            f"it was prepared with another tokenizer ({_name(held_out)}) than the training data "
            f"({_name(train)}): prepare it with that one"
        )
    if held_out.eot != train.eot:
        return (
            f"its documents end with token {held_out.eot}, those of the training data with "
            f"{train.eot}: prepare it with the same --eot"
        )
    if held_out.tokens <= seq_len:
        return (
            f"it holds {held_out.tokens} tokens, fewer than the {seq_len + 1} of one sample of "
            f"train.seq_len={seq_len}: prepare more held-out text, or lower train.seq_len"
        )
    return None


def _name(index: Index) -> str:
    if index.tokenizer.kind == "byte":
        return "byte"
    name = index.tokenizer_name or TOKENIZER_FILE
    return f"{name}, SHA-256 {index.tokenizer.fingerprint[:8]}"
