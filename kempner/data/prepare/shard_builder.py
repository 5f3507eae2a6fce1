"""Builds one token file from one unit of text, and records it when it is in place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from kempner.data.files.index import Index, Record, Shard, TokenizerIdentity
from kempner.data.files.token_file import TokenWriter, verify_shard
from kempner.data.prepare.sources import Origin, Piece, Unit, describe_unit, documents, read_piece
from kempner.data.prepare.tokenizers import Encode, TokenizerSpec
from kempner.run.process.durable_io import fsync_directory, write_durable
from kempner.run.process.exit_codes import DataError, UsageError, cannot_write

PROGRESS = ".progress"


@dataclass(frozen=True)
class Recipe:
    """What decides the content of a shard besides its text, and where it goes."""

    out: Path
    tokenizer: TokenizerSpec
    text_key: str

    @property
    def progress(self) -> Path:
        """The folder of what is needed only until the index is written."""
        return self.out / PROGRESS


@dataclass(frozen=True)
class Built:
    """A shard that is in place; `kept` if it was before."""

    shard: Shard
    kept: bool


class UnitRecord(Record):
    """A shard that is in place, and the tokenizer that made it."""

    tokenizer: TokenizerIdentity
    eot: int
    shard: Shard


def build(recipe: Recipe, unit: Unit) -> Built:
    """Make the token file of a unit, unless it is there already and intact.

    Raises DataError if text cannot be read or the file cannot be written.
    """
    shard = _in_place(recipe, unit)
    if shard is not None:
        return Built(shard, kept=True)
    try:
        return Built(_make(recipe, unit), kept=False)
    except OSError as error:
        advice = "finished files are kept: run the same command again when that is fixed"
        raise cannot_write(recipe.out / unit.shard_file, error, advice) from error


def confirm(recipe: Recipe, index: Index, unit: Unit) -> Built:
    """A shard of a finished directory, verified.

    Raises UsageError if it was made from other text, DataError if it is damaged.
    """
    shard = index.shards[unit.number]
    if shard.source != describe_unit(unit, recipe.text_key):
        raise prepared_differently(recipe.out, f"from other text (see {shard.source.first})")
    verify_shard(recipe.out, shard, index.dtype)
    return Built(shard, kept=True)


def prepared_differently(out: Path, how: str) -> UsageError:
    """The refusal to mix two preparations in one directory; `how` the one there was made."""
    return UsageError(
        f"{out} was prepared {how}: choose another --out, or remove that directory first"
    )


def commit(temporary: Path, final: Path) -> None:
    """Give a durable file its name, durably."""
    temporary.replace(final)
    fsync_directory(final.parent)


def temporary_path(recipe: Recipe, name: str) -> Path:
    """Where a file is written before it gets its name; no two processes share one."""
    path = recipe.progress / f"{name}.{os.getpid()}"
    path.unlink(missing_ok=True)  # of a killed process that had the same id
    return path


def _record_path(recipe: Recipe, unit: Unit) -> Path:
    return (recipe.progress / unit.shard_file).with_suffix(".json")


def _in_place(recipe: Recipe, unit: Unit) -> Shard | None:
    """The unit's shard, if an earlier run made exactly this one and it is intact."""
    try:
        record = UnitRecord.model_validate_json(_record_path(recipe, unit).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    tokenizer = recipe.tokenizer
    if (record.tokenizer, record.eot) != (tokenizer.identity, tokenizer.eot):
        return None
    if record.shard.source != describe_unit(unit, recipe.text_key):
        return None
    try:
        verify_shard(recipe.out, record.shard, tokenizer.dtype)
    except DataError:
        return None
    return record.shard


def _make(recipe: Recipe, unit: Unit) -> Shard:
    temporary = temporary_path(recipe, unit.shard_file)
    origin = Origin(recipe.text_key)
    full = empty = 0
    with TokenWriter(temporary, recipe.tokenizer.dtype) as writer:
        for piece in unit.pieces:
            content = read_piece(piece)
            origin.add(piece, content)
            counts = _encode_piece(recipe, piece, content, writer)
            full, empty = full + counts[0], empty + counts[1]
        written = writer.finish()
    commit(temporary, recipe.out / unit.shard_file)
    shard = Shard(
        file=unit.shard_file,
        tokens=written.tokens,
        documents=full,
        empty_documents=empty,
        bytes=written.bytes,
        checksum=written.checksum,
        source=origin.source(),
    )
    _write_record(recipe, unit, shard)
    return shard


def _write_record(recipe: Recipe, unit: Unit, shard: Shard) -> None:
    tokenizer = recipe.tokenizer
    record = UnitRecord(tokenizer=tokenizer.identity, eot=tokenizer.eot, shard=shard)
    path = _record_path(recipe, unit)
    temporary = temporary_path(recipe, path.name)
    write_durable(temporary, record.model_dump_json().encode())
    commit(temporary, path)


def _encode_piece(
    recipe: Recipe, piece: Piece, content: bytes, writer: TokenWriter
) -> tuple[int, int]:
    """Append a piece's documents; the numbers of those that end in it: (with text, without)."""
    encode = _encoder(recipe.tokenizer)
    end = np.array([recipe.tokenizer.eot])
    full = empty = 0
    for document in documents(piece, content, recipe.text_key):
        if not document:
            empty += 1
            continue
        try:
            writer.append(encode(document))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{piece.file.path} is not UTF-8 (at byte {error.start}): "
                "convert it, or use --tokenizer byte, which takes any bytes"
            ) from error
        if piece.ends_document:
            writer.append(end)
            full += 1
    return full, empty


@lru_cache(maxsize=1)
def _encoder(tokenizer: TokenizerSpec) -> Encode:
    return tokenizer.encoder()
