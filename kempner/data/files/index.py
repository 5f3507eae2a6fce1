"""The index of a prepared directory: its token files and their order.

`index.json` is written last; a directory without one is unfinished. The token stream of the
directory is the concatenation of the shards in the index's order.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from xxhash import xxh3_128_hexdigest

from kempner.config.errors import dotted
from kempner.data.order.shuffle import PERMUTATION_VERSION
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import read_filled, storage_waits

INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
"""Copy of the tokenizer that made the tokens; not there for bytes."""
WINDOW_VERSION = 1
"""Sample i is the tokens [i * seq_len, i * seq_len + seq_len]; a change of this rule raises it."""

Dtype = Literal["uint16", "uint32"]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    """A frozen piece of JSON, strict about its keys and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TokenizerIdentity(Record):
    """Which tokenizer made the tokens."""

    kind: Literal["byte", "huggingface"]
    fingerprint: str
    """SHA-256 of the tokenizer.json; the scheme's name for bytes."""


class Source(Record):
    """What a shard was made from."""

    first: str
    """Name of the first file that it holds a part of."""
    files: Count
    digest: Checksum
    """xxh3_128 over the names, the ranges and the bytes of all parts."""


class Shard(Record):
    """One token file."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    tokens: Count
    documents: Count
    empty_documents: Count
    """Documents without text, which are left out."""
    bad_lines: Count = 0
    """Lines, or rows of a table, that hold no text and are left out."""
    unproven_cuts: Count = 0
    """Places in long documents where a token may differ from those of the whole document."""
    bytes: Count
    """Size of the file, header included."""
    checksum: Checksum
    """xxh3_128 of the tokens as they are on disk."""
    source: Source


class Index(Record):
    """The whole directory; the counts are the sums over the shards."""

    format: Literal["kempner-tokens"]
    version: Literal[1]
    dtype: Dtype
    vocab_size: Annotated[int, Field(gt=0)]
    eot: Count
    """Token that follows every document."""
    tokenizer: TokenizerIdentity
    tokenizer_name: str = ""
    """Its file with the folder that it was in, for people; empty for bytes."""
    tokens: Count
    documents: Count
    shards: Annotated[list[Shard], Field(min_length=1)]

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

    def starts(self) -> list[int]:
        """Position of every shard's first token in the stream."""
        return [0, *accumulate(shard.tokens for shard in self.shards)][:-1]

    def to_bytes(self) -> bytes:
        """The content of `index.json`; equal for equal indexes."""
        return (json.dumps(self.model_dump(), indent=2, ensure_ascii=False) + "\n").encode()


def read_index(directory: Path, worked: bool = False) -> Index:
    """The index of a prepared directory; `worked` is whether this run has read it before.

    Raises DataError, naming file and key, if there is none or it does not make sense, and as
    `StorageWaits.retry` where it cannot be read now.
    """
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
    """Samples of seq_len + 1 tokens, neighbours sharing one.

    Raises DataError if there is not a single one.
    """
    count = (index.tokens - 1) // seq_len
    if count < 1:
        raise DataError(
            f"the data holds {index.tokens} tokens, fewer than the {seq_len + 1} of one sample "
            f"of seq_len={seq_len}: prepare more text or lower train.seq_len"
        )
    return count


def fingerprint(index: Index, seq_len: int) -> str:
    """Identity of all samples and of their order under a seed, as 32 hexadecimal digits.

    It covers the tokens, the order of the shards, the sequence length, the rule that cuts samples
    and the version of the permutation.
    """
    identity = {
        "checksums": [shard.checksum for shard in index.shards],
        "dtype": index.dtype,
        "seq_len": seq_len,
        "window": WINDOW_VERSION,
        "permutation": PERMUTATION_VERSION,
    }
    return xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())
