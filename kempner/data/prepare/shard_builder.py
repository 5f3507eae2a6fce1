"""Builds one token file from one unit of text, and records it when it is in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from kempner.data.files.chat_template import ChatTemplate
from kempner.data.files.index import (
    Count,
    Dtype,
    Index,
    Kind,
    Shard,
    StrictRecord,
    TokenizerIdentity,
)
from kempner.data.files.token_file import TokenWriter, verify_shard
from kempner.data.prepare.chats import CHAT_KEYS, Document, documents_of, pair_of, read_chat
from kempner.data.prepare.documents import (
    BadLine,
    Parts,
    Tally,
    line_parts,
    line_records,
    row_parts,
    row_records,
    text_parts,
)
from kempner.data.prepare.long_text import CONTEXT, BlockEncoder, ByteEncoder, Ids
from kempner.data.prepare.process_pool import Report
from kempner.data.prepare.rows import RowWriter
from kempner.data.prepare.sources import Piece, Unit, UnitOrigin, describe_unit, text_before
from kempner.data.prepare.tokenizers import TokenizerSpec
from kempner.run.process.durable_io import fsync_directory, write_durable
from kempner.run.process.exit_codes import DataError, UsageError, cannot_write

PROGRESS = ".progress"


@dataclass(frozen=True)
class ChatRecipe:
    """How chats become rows of `seq_len` tokens."""

    kind: Kind
    seq_len: int
    template: ChatTemplate

    def documents(self, record: dict[str, Any]) -> list[list[Document]]:
        """Those of an object, in groups that stay together in a row. Raises `ValueError`, a clause,
        if nothing can be learned from it."""
        if self.kind == "preferences":
            return [pair_of(record, self.template)]
        return [[document] for document in documents_of(read_chat(record), self.template)]


@dataclass(frozen=True)
class Recipe:
    """What decides the content of a shard besides its text, and where it goes."""

    out: Path
    tokenizer: TokenizerSpec
    text_key: str
    chats: ChatRecipe | None = None

    @property
    def columns(self) -> str | tuple[str, ...]:
        """The column of text of a table, or those of chats."""
        return self.text_key if self.chats is None else CHAT_KEYS

    @property
    def dtype(self) -> Dtype:
        return self.tokenizer.dtype if self.chats is None else "uint32"

    def key(self, unit: Unit) -> str:
        """What is taken of the objects of a unit, and how, as its digest has it."""
        if self.chats is None:
            return self.text_key
        how = f"in {self.chats.seq_len} by {self.chats.template.fingerprint}"
        return f"{self.chats.kind} {how}{', the last' if unit.last else ''}"

    @property
    def progress(self) -> Path:
        """The folder of what is needed only until the index is written."""
        return self.out / PROGRESS


@dataclass(frozen=True)
class BuiltShard:
    """A shard that is in place; `kept` if it was before."""

    shard: Shard
    kept: bool
    lines: Tally  # what was counted in its text


class BadLineRecord(StrictRecord):
    piece: Count
    offset: Count
    reason: str


class UnitRecord(StrictRecord):
    tokenizer: TokenizerIdentity
    eot: int
    shard: Shard
    lines: Count
    first_bad: BadLineRecord | None


def build(recipe: Recipe, unit: Unit, report: Report) -> BuiltShard:
    """Make the token file of a unit, unless it is there already and intact. Raises DataError if
    text cannot be read or the file cannot be written."""
    built = _in_place(recipe, unit)
    if built is None:
        try:
            built = _make(recipe, unit, report)
        except OSError as error:
            advice = "finished files are kept: run the same command again when that is fixed"
            raise cannot_write(recipe.out / unit.shard_file, error, advice) from error
    report(unit.size)
    return built


def confirm(recipe: Recipe, index: Index, unit: Unit, report: Report) -> BuiltShard:
    """A shard of a finished directory, verified. Raises UsageError if it was made from other text,
    DataError if it is damaged."""
    shard = index.shards[unit.number]
    if shard.source != describe_unit(unit, recipe.key(unit)):
        raise prepared_differently(recipe.out, f"from other text (see {shard.source.first})")
    verify_shard(recipe.out, shard, index.dtype)
    report(unit.size)
    return BuiltShard(shard, kept=True, lines=Tally(bad=shard.bad_lines))


def prepared_differently(out: Path, how: str) -> UsageError:
    """The refusal to mix two preparations in one directory; `how` the one there was made."""
    return UsageError(
        f"{out} was prepared {how}: choose another --out, or remove that directory first"
    )


def commit(temporary: Path, final: Path) -> None:
    temporary.replace(final)
    fsync_directory(final.parent)


def put(recipe: Recipe, final: Path, content: bytes) -> None:
    """Write a small file, durably and whole, or not at all."""
    temporary = temporary_path(recipe, final.name)
    write_durable(temporary, content)
    commit(temporary, final)


def temporary_path(recipe: Recipe, name: str) -> Path:
    """Where a file is written before it gets its name; no two processes share one."""
    path = recipe.progress / f"{name}.{os.getpid()}"
    path.unlink(missing_ok=True)  # of a killed process that had the same id
    return path


def _record_path(recipe: Recipe, unit: Unit) -> Path:
    return (recipe.progress / unit.shard_file).with_suffix(".json")


def _in_place(recipe: Recipe, unit: Unit) -> BuiltShard | None:
    """The unit's shard, if an earlier run made exactly this one and it is intact."""
    try:
        record = UnitRecord.model_validate_json(_record_path(recipe, unit).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    tokenizer, shard = recipe.tokenizer, record.shard
    if (record.tokenizer, record.eot) != (tokenizer.identity, tokenizer.eot):
        return None
    if shard.source != describe_unit(unit, recipe.key(unit)):
        return None
    try:
        verify_shard(recipe.out, shard, recipe.dtype)
    except DataError:
        return None
    bad = record.first_bad
    first = BadLine(unit.pieces[bad.piece], bad.offset, bad.reason) if bad else None
    return BuiltShard(shard, kept=True, lines=Tally(record.lines, shard.bad_lines, first))


def _make(recipe: Recipe, unit: Unit, report: Report) -> BuiltShard:
    temporary, done = temporary_path(recipe, unit.shard_file), 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        report(done)

    origin, tally, made = UnitOrigin(recipe.key(unit)), Tally(), _Counts()
    with TokenWriter(temporary, recipe.dtype) as writer:
        if recipe.chats is None:
            encoding = _Encoding(recipe, writer, made)
            for piece in unit.pieces:
                with _opened(recipe, piece, origin, tally, progress) as parts:
                    encoding.add_piece(piece, parts)
        else:
            rows = RowWriter(writer, recipe.chats.seq_len, recipe.tokenizer.eot)
            for piece in unit.pieces:
                with _opened_chats(recipe.chats, piece, origin, tally, progress) as chats:
                    _add_chats(chats, rows, recipe.chats.seq_len, made)
            rows.finish(unit.last)
        written = writer.finish()
    commit(temporary, recipe.out / unit.shard_file)
    shard = Shard(
        file=unit.shard_file,
        tokens=written.tokens,
        documents=made.full,
        empty_documents=made.empty,
        bad_lines=tally.bad,
        unproven_cuts=made.unproven,
        truncated=made.truncated,
        left_out=made.left_out,
        bytes=written.bytes,
        checksum=written.checksum,
        source=origin.source(),
    )
    _write_record(recipe, unit, shard, tally)
    return BuiltShard(shard, kept=False, lines=tally)


@contextmanager
def _opened(
    recipe: Recipe, piece: Piece, origin: UnitOrigin, tally: Tally, progress: Callable[[int], None]
) -> Iterator[Parts]:
    """The parts of a piece's documents. Raises as `Origin.opened`, also in the block."""
    if piece.file.format == "parquet":
        with origin.opened(piece):
            yield row_parts(piece, tally, recipe.text_key, progress)
        return
    with origin.opened(piece, progress) as stream:
        if piece.file.format == "jsonl":
            yield line_parts(piece, stream, tally, recipe.text_key)
        else:
            utf8 = not recipe.tokenizer.splits_anywhere
            yield text_parts(piece, stream, tally, utf8=utf8)


@contextmanager
def _opened_chats(
    chats: ChatRecipe,
    piece: Piece,
    origin: UnitOrigin,
    tally: Tally,
    progress: Callable[[int], None],
) -> Iterator[Iterator[list[list[Document]]]]:
    """The documents of each chat of a piece; see `_opened`."""
    if piece.file.format == "parquet":
        with origin.opened(piece):
            yield row_records(piece, tally, CHAT_KEYS, chats.documents, progress)
        return
    with origin.opened(piece, progress) as stream:
        yield line_records(piece, stream, tally, chats.documents)


def _add_chats(
    chats: Iterator[list[list[Document]]], rows: RowWriter, seq_len: int, made: _Counts
) -> None:
    """A document that is longer than a row is truncated; a pair has to fit as it is."""
    for group in (each for groups in chats for each in groups):
        longer = sum(len(document.ids) for document in group) > seq_len
        tokens = [document.cut(seq_len) for document in group]
        whole = [each for each in tokens if each is not None]
        if len(whole) < len(group) or (longer and len(group) > 1):
            made.left_out += len(group)
        else:
            rows.add(np.concatenate(whole))
            made.full += len(group)
        made.truncated += longer and len(group) == 1


@dataclass
class _Counts:
    """Of the documents of a shard."""

    full: int = 0
    empty: int = 0
    unproven: int = 0
    truncated: int = 0
    left_out: int = 0


class _Encoding:
    def __init__(self, recipe: Recipe, writer: TokenWriter, made: _Counts) -> None:
        self._made = made
        self._tokenizer, self._writer = recipe.tokenizer, writer
        self._end = np.array([recipe.tokenizer.eot])

    def add_piece(self, piece: Piece, parts: Parts) -> None:
        """The documents of a piece; the first or the last may go on in another one."""
        document: ByteEncoder | BlockEncoder | None = None
        if piece.file.one_document and piece.start:
            document = self._encoder(text_before(piece, CONTEXT))
        for content, ends in parts:
            if content:
                document = document or self._encoder()
                for tokens in document.feed(content):
                    self._writer.append(tokens)
            if ends and document is None:
                self._made.empty += 1
            elif ends and document is not None:
                self._finish(document)
                self._writer.append(self._end)
                self._made.full += 1
                document = None
        if document is not None:
            self._finish(document)

    def _encoder(self, before: bytes = b"") -> ByteEncoder | BlockEncoder:
        if self._tokenizer.splits_anywhere:
            return ByteEncoder()
        return BlockEncoder(_ids(self._tokenizer), before)

    def _finish(self, document: ByteEncoder | BlockEncoder) -> None:
        self._writer.append(document.end())
        self._made.unproven += document.unproven


def _write_record(recipe: Recipe, unit: Unit, shard: Shard, lines: Tally) -> None:
    tokenizer, first = recipe.tokenizer, lines.first
    bad = None
    if first is not None:
        number = unit.pieces.index(first.piece)
        bad = BadLineRecord(piece=number, offset=first.offset, reason=first.reason)
    record = UnitRecord(
        tokenizer=tokenizer.identity,
        eot=tokenizer.eot,
        shard=shard,
        lines=lines.lines,
        first_bad=bad,
    )
    put(recipe, _record_path(recipe, unit), record.model_dump_json().encode())


@lru_cache(maxsize=1)
def _ids(tokenizer: TokenizerSpec) -> Ids:
    return tokenizer.ids()
