"""Reads .gz, .zst and parquet as streams, in bounded memory; the latter two by pyarrow."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from kempner.run.process.exit_codes import DataError, UsageError

Item = TypeVar("Item")

_ROWS = 128  # of parquet, at a time
_BUFFER = 2**20


class UnpackError(Exception):
    """A packed file is damaged; a clause that follows the file's name."""


def _required(module: str, path: Path) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{path} needs the package pyarrow: pip install 'kempner[prepare]'"
        ) from error


class _Borrowed(io.RawIOBase):
    """A stream that stays open when pyarrow closes it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = cast(io.BufferedReader, raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._raw.readinto(buffer)


@contextmanager
def open_packed(raw: BinaryIO, packing: str, path: Path) -> Iterator[BinaryIO]:
    """The content of `raw`, unpacked while it is read. Raises UnpackError, also in the block, if it
    is damaged; UsageError if a package is missing."""
    try:
        if packing == ".gz":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif packing:
            stream = _required("pyarrow", path).CompressedInputStream(_Borrowed(raw), "zstd")
            yield cast(BinaryIO, io.BufferedReader(stream, 2**18))
        else:
            yield raw
    except (OSError, zlib.error, EOFError) as error:
        if not packing or getattr(error, "errno", None) is not None:
            raise  # of the file, or of what is done with its content
        words = "cannot be unpacked: it is damaged, cut off, or not what its name says"
        raise UnpackError(words) from error


def row_groups(path: Path, column: str | tuple[str, ...]) -> list[int]:
    """The byte of the file at which each row group starts. Raises DataError if it is no parquet
    file, UsageError if it has no such column of text, or none of several of any type."""
    with _table(path) as table:
        if isinstance(column, str):
            _check_column(path, table.schema_arrow, column)
        elif not set(column) & set(table.schema_arrow.names):
            names = ", ".join(table.schema_arrow.names) or "none"
            raise UsageError(f"{path} has none of the columns of chats (it has: {names})")
        return [_start(table.metadata.row_group(n)) for n in range(table.metadata.num_row_groups)]


def texts(
    path: Path, column: str, start: int, stop: int
) -> Iterator[tuple[int, float, bytes | None]]:
    """The texts in the row groups that start in the bytes [start, stop); None for null. Each comes
    with the number of its row in the file, from 1, and the share of the rows so far. Raises
    DataError if they cannot be read."""
    with _table(path) as table:
        yield from _numbered(table, start, stop, lambda n: _column(table, path, n, column))


def records(
    path: Path, columns: Sequence[str], start: int, stop: int
) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """The same for objects: what stands in the columns, as far as the file has them."""
    with _table(path) as table:
        there = [name for name in table.schema_arrow.names if name in columns]
        yield from _numbered(table, start, stop, lambda n: _objects(table, n, there))


def _numbered(
    table: Any, start: int, stop: int, read: Callable[[int], Iterator[Item]]
) -> Iterator[tuple[int, float, Item]]:
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    wanted = [number for number, group in enumerate(groups) if start <= _start(group) < stop]
    total = sum(groups[number].num_rows for number in wanted)
    done = 0
    for number in wanted:
        before = sum(group.num_rows for group in groups[:number])
        for row, item in enumerate(read(number), before + 1):
            done += 1
            yield row, done / total, item


def _objects(table: Any, group: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    for batch in table.iter_batches(_ROWS, row_groups=[group], columns=columns, use_threads=False):
        yield from batch.to_pylist()


def _column(table: Any, path: Path, group: int, column: str) -> Iterator[bytes | None]:
    arrow = _required("pyarrow", path)
    for batch in table.iter_batches(_ROWS, row_groups=[group], columns=[column], use_threads=False):
        values = batch.column(0)
        if arrow.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        for value in values.cast(arrow.large_binary()):
            yield value.as_py()


def _start(group: Any) -> int:
    """The byte at which a row group starts: where the first of its columns does."""
    starts: list[int] = []
    for column in (group.column(number) for number in range(group.num_columns)):
        starts.append(column.data_page_offset)
        if column.dictionary_page_offset:
            starts.append(column.dictionary_page_offset)
    return min(starts)


def _check_column(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        names = ", ".join(schema.names) or "none"
        raise UsageError(f'{path} has no column "{column}" (it has: {names}); see --text-key')
    types = _required("pyarrow", path).types
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise UsageError(f'column "{column}" of {path} holds {kind}, not text; see --text-key')


@contextmanager
def _table(path: Path) -> Iterator[Any]:
    """The file, which is closed in the end. Raises DataError, also in the block."""
    arrow, parquet = _required("pyarrow", path), _required("pyarrow.parquet", path)
    try:
        # Page by page: by default all of a row group's column would be in memory.
        with parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as table:
            yield table
    except arrow.ArrowException as error:
        raise DataError(f"{path} cannot be read: it is damaged, or not parquet") from error
    except OSError as error:
        why = error.strerror or "it is damaged, or not parquet"
        raise DataError(f"{path} cannot be read: {why}") from error
