"""The index of a prepared directory: its token files and their order.

`index.json` is written last; a directory without one is unfinished. The token stream of the
directory is the concatenation of the shards in the index's order. What a configuration asks of its
data is judged by their indexes alone.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from xxhash import xxh3_128_hexdigest

from kempner.config.errors import dotted
from kempner.config.sections import Config, HeldOutFolder
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import describe, empty, read_filled, storage_waits

INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"  # copy of the tokenizer that made the tokens; not there for bytes
WINDOW_VERSION = 1
"""Sample i is the tokens [i * seq_len, i * seq_len + seq_len]; a change of this rule raises it."""

Dtype = Literal["uint16", "uint32"]
Kind = Literal["text", "chats", "preferences"]
MOST_FLAGGED = 2**30  # token ids beside which the two flags of `token_file.py` have room
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0)]


class StrictRecord(BaseModel):
    """A frozen piece of JSON, strict about its keys and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TokenizerIdentity(StrictRecord):
    kind: Literal["byte", "huggingface"]
    fingerprint: str  # SHA-256 of the tokenizer.json; the scheme's name for bytes


class ShardSource(StrictRecord):
    first: str  # name of the first file that it holds a part of
    files: Count
    digest: Checksum  # xxh3_128 over the names, the ranges and the bytes of all parts


class Shard(StrictRecord):
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    tokens: Count
    documents: Count
    empty_documents: Count  # documents without text, which are left out
    bad_lines: Count = 0  # lines, or rows of a table, that hold no text and are left out
    unproven_cuts: Count = 0
    """Places in long documents where a token may differ from those of the whole document."""
    truncated: Count = 0  # documents of chats that were longer than a row
    left_out: Count = (
        0  # of chats without an answer in the length of a row, of pairs that are longer
    )
    bytes: Count  # size of the file, header included
    checksum: Checksum  # xxh3_128 of the tokens as they are on disk
    source: ShardSource


class Index(StrictRecord):
    """The whole directory; the counts are the sums over the shards."""

    format: Literal["kempner-tokens"]
    version: Literal[1]
    dtype: Dtype
    vocab_size: Annotated[int, Field(gt=0)]
    eot: Count  # token that follows every document
    tokenizer: TokenizerIdentity
    tokenizer_name: str = ""  # its file with the folder that it was in, for people; empty for bytes
    tokens: Count
    documents: Count
    shards: Annotated[list[Shard], Field(min_length=1)]
    kind: Kind = "text"
    """Of chats and preferences each token has flags (`token_file.py`), and each `seq_len` tokens
    are a row of whole documents (`prepare/rows.py`); one token follows the last row."""
    seq_len: Annotated[int, Field(gt=1)] | None = None
    template: str = ""  # fingerprint of the chat template; empty for text

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        for key in ("tokens", "documents"):
            total = sum(getattr(shard, key) for shard in self.shards)
            if getattr(self, key) != total:
                raise ValueError(f"{key} is {getattr(self, key)}, but its shards hold {total}")
        if self.eot >= self.vocab_size:
            raise ValueError(f"eot={self.eot} is not below vocab_size={self.vocab_size}")
        if len({shard.file for shard in self.shards}) < len(self.shards):
            raise ValueError("a file is listed twice among its shards")
        return self

    @model_validator(mode="after")
    def _is_in_rows(self) -> Self:
        if self.kind == "text":
            if self.seq_len is not None:
                raise ValueError("text has no seq_len")
            return self
        if self.seq_len is None or self.dtype != "uint32" or self.vocab_size > MOST_FLAGGED:
            raise ValueError(f"{self.kind} need a seq_len, uint32, and fewer than 2**30 token ids")
        if self.tokens % self.seq_len != 1:
            raise ValueError(f"{self.tokens} tokens are not rows of {self.seq_len} and one more")
        return self

    def starts(self) -> list[int]:
        return [0, *accumulate(shard.tokens for shard in self.shards)][:-1]

    def to_bytes(self) -> bytes:
        """The content of `index.json`; equal for equal indexes, and for text as it always was."""
        of_chats: dict[str, Any] = dict.fromkeys(("kind", "seq_len", "template"), True)
        of_chats["shards"] = {"__all__": {"truncated", "left_out"}}
        content = self.model_dump(exclude=of_chats if self.kind == "text" else None)
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def read_index(directory: Path, worked: bool = False) -> Index:
    """The index of a prepared directory; `worked` is whether this run has read it before. Raises
    DataError, naming file and key, if there is none or it does not make sense, and as
    `StorageWaits.retry` where it cannot be read now."""
    path = directory / INDEX_FILE
    try:
        content = storage_waits().retry(partial(read_filled, path), worked)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{directory} is not prepared data: it has no {INDEX_FILE}; "
            f"run (again, if it was interrupted) kempner prepare --out {directory} FILE..."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return Index.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = f"{dotted(first['loc'])}: " if first["loc"] else ""
        raise DataError(
            f"{path} is not an index that this version of kempner can read: {place}{first['msg']}"
        ) from error


def sample_count(index: Index, seq_len: int) -> int:
    """Samples of seq_len + 1 tokens, neighbours sharing one. Raises DataError if there is not a
    single one, or the data is in rows of another length."""
    if refusal := _other_rows(index, seq_len):
        raise DataError(refusal)
    count = (index.tokens - 1) // seq_len
    if count < 1:
        raise DataError(
            f"the data holds {index.tokens} tokens, fewer than the {seq_len + 1} of one sample "
            f"of seq_len={seq_len}: prepare more text or lower train.seq_len"
        )
    return count


def _other_rows(index: Index, seq_len: int) -> str:
    if index.seq_len in (None, seq_len):
        return ""
    return (
        f"its {index.kind} are packed into rows of {index.seq_len} tokens, and train.seq_len is "
        f"{seq_len}: set train.seq_len={index.seq_len}, or prepare them again with "
        f"--seq-len {seq_len}"
    )


def fingerprint(index: Index, seq_len: int) -> str:
    """Identity of all samples and of their order under a seed, as 32 hexadecimal digits. It covers
    the tokens, the order of the shards, the sequence length, the rule that cuts samples and the
    version of the permutation."""
    from kempner.data.order.shuffle import PERMUTATION_VERSION  # imports NumPy

    identity = {
        "checksums": [shard.checksum for shard in index.shards],
        "dtype": index.dtype,
        "seq_len": seq_len,
        "window": WINDOW_VERSION,
        "permutation": PERMUTATION_VERSION,
    }
    return xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())


_LOOKS_AT_ONCE = 16
"""Token files whose sizes are asked for at a time: on a network file system each takes a while."""


def find_data(key: str, folder: str, worked: bool = False) -> Index:
    """The index of a prepared folder all of whose token files are there, in their sizes. `key` is
    that of the configuration which names it, `worked` whether the run has read it before. Raises
    `DataError`, and as `StorageWaits.retry` where it cannot be seen now."""
    try:
        index = read_index(Path(folder), worked)
        _check_sizes(Path(folder), index, worked)
    except DataError as error:
        raise DataError(f"{key}={folder}: {error}") from error
    return index


def _check_sizes(folder: Path, index: Index, worked: bool) -> None:
    def check(shard: Shard) -> None:
        path = folder / shard.file
        try:
            size = storage_waits().retry(partial(_size, path, shard.bytes if worked else 0), worked)
        except OSError as error:
            raise DataError(
                f"token file {describe(error)}; copy it from where the data was prepared, or "
                "prepare the data again"
            ) from error
        if size != shard.bytes:
            raise DataError(
                f"token file {path} has {size} bytes, the index says {shard.bytes}; copy it again "
                "from where the data was prepared, or prepare the data again"
            )

    with ThreadPoolExecutor(_LOOKS_AT_ONCE, "sizes") as pool:
        for _ in pool.map(check, index.shards):
            pass


def _size(path: Path, expected: int) -> int:
    """Raises `OSError`, also if the file is empty and `expected` is not 0."""
    size = path.stat().st_size
    if expected and not size:
        raise empty(path, expected)
    return size


def tokenizer_file(folder: Path) -> Path | None:
    """The copy of the tokenizer.json that made the tokens of a prepared directory. None for bytes,
    and in a directory without a copy. Raises DataError if the copy is another tokenizer than the
    index says, and as `read_index`."""
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
    if held_out.kind == "preferences" != train.kind:
        return "it holds preferences: prepare text, or chats with --chats"
    if train.kind == "preferences" != held_out.kind:
        return f"it holds {held_out.kind}, and the training data pairs: prepare some, too"
    if refusal := _other_rows(held_out, seq_len):
        return refusal
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


def vocabulary(config: Config, index: Index) -> int:
    """How many token ids the model has: as configured, else as many as its data. Raises DataError,
    naming the key to set, if the data has more than are configured."""
    wanted, there = config.model.vocab_size, index.vocab_size
    if wanted is not None and wanted < there:
        raise DataError(
            f"model.vocab_size={wanted} is too small for data.dataset_path="
            f"{config.data.dataset_path}, which has {there} token ids: set "
            f"--model.vocab_size={there}"
        )
    return wanted or there


def check_samples(config: Config, index: Index) -> None:
    """Raise `DataError` if a model cannot be trained on this data as configured."""
    if (index.kind == "preferences") != config.preferences.on:
        asked = (
            "but preferences.beta is set: prepare pairs with --preferences, or remove it"
            if config.preferences.on
            else "of which the loss of a next token would learn the rejected answers, too: set "
            "preferences.beta (0.1 is usual) and adapter.rank, or prepare chats with --chats"
        )
        raise DataError(f"data.dataset_path={config.data.dataset_path} holds {index.kind}, {asked}")
    if index.kind != "text" and config.model.factory is not None:
        raise DataError(
            f"data.dataset_path={config.data.dataset_path} holds {index.kind}, which "
            "a model of model.factory cannot be kept from seeing all of a row: name a model by "
            "model.name, or prepare the data as text"
        )
    try:
        sample_count(index, config.train.seq_len)
    except DataError as error:
        raise DataError(f"data.dataset_path={config.data.dataset_path}: {error}") from error


def check_held_out(config: Config, index: Index, named: HeldOutFolder, held_out: Index) -> None:
    """Raise DataError if a model that learns from `index` cannot be evaluated on the set `named`
    so, whose index is `held_out`."""
    if refusal := check_compatible(index, held_out, config.train.seq_len):
        idle = named.key if named.name else "eval.interval"
        raise DataError(
            f"{named.key}={named.folder}: {refusal}, or remove {idle} from the configuration"
        )
