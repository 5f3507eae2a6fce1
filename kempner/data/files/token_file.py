"""Token files: a header of 64 bytes, then the tokens as little-endian unsigned integers.

| offset | bytes | content                                             |
|--------|-------|-----------------------------------------------------|
| 0      | 8     | `KEMPTOK1`                                          |
| 8      | 4     | bytes per token: 2 or 4                             |
| 12     | 4     | zero                                                |
| 16     | 8     | number of tokens                                    |
| 24     | 16    | xxh3_128 of the tokens' bytes, big-endian           |
| 40     | 24    | zero                                                |

In chats the two highest bits of each token of 4 bytes are flags: `LEARNED`, it is a target of the
loss, and `BEGINS`, it is the first of a document.

The checksum makes a file that took another's place known at once, without reading it through.
Files are read with positioned reads and never mapped: an I/O error of a mapping is a SIGBUS.
"""

from __future__ import annotations

import errno
import os
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from kempner.cluster.machine import files_to_spare
from kempner.data.files.index import INDEX_FILE, Dtype, Index, Shard, read_index, sample_count
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import empty, storage_waits

Tokens = NDArray[np.uint16] | NDArray[np.uint32]

LEARNED = 1 << 31
BEGINS = 1 << 30
ID = BEGINS - 1  # the bits that are the token's id

_MAGIC = b"KEMPTOK1"
_HEADER = struct.Struct("<8sIIQ16s24x")
_ITEM_SIZES: dict[Dtype, int] = {"uint16": 2, "uint32": 4}
_BLOCK = 8 * 2**20
_SEARCHED = 2**16
"""Tokens that are read at a time in search of a document's beginning."""


def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


@dataclass(frozen=True)
class WrittenFile:
    tokens: int
    bytes: int
    checksum: str


class TokenWriter:
    """Writes one token file; it is valid, and durable, once `finish` has returned."""

    def __init__(self, path: Path, dtype: Dtype) -> None:
        self._item_size = _ITEM_SIZES[dtype]
        self._dtype = numpy_dtype(dtype)
        self._checksum = xxh3_128()
        self._tokens = 0
        self._file = open(path, "wb", buffering=2**20)  # noqa: SIM115 - closed by __exit__
        self._file.write(bytes(_HEADER.size))

    def append(self, tokens: NDArray[Any]) -> None:
        """Add tokens [k]. ValueError if one does not fit the type."""
        if tokens.size and not 0 <= int(tokens.max()) <= np.iinfo(self._dtype).max:
            raise ValueError(f"token {int(tokens.max())} does not fit {self._dtype}")
        content = tokens.astype(self._dtype, copy=False).tobytes()
        self._checksum.update(content)
        self._tokens += tokens.size
        self._file.write(content)

    def finish(self) -> WrittenFile:
        digest = self._checksum.digest()
        self._file.seek(0)
        self._file.write(_HEADER.pack(_MAGIC, self._item_size, 0, self._tokens, digest))
        self._file.flush()
        os.fsync(self._file.fileno())
        size = _HEADER.size + self._tokens * self._item_size
        return WrittenFile(self._tokens, size, digest.hex())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Corpus:
    """The token stream of a prepared directory, read where it is needed.

    A shard stays open once it has been read: to open one is a request, or several, to the servers
    of shared storage. At most `max_open` are open at once, or, without it, as many as the limit
    of open files allows. An instance belongs to one thread; `reopened` gives another thread its
    own. Pickled, it travels without its open files. `worked` is whether this run has read the
    directory before.
    """

    def __init__(
        self, directory: Path, index: Index, max_open: int | None = None, worked: bool = False
    ) -> None:
        if max_open is not None and max_open < 1:
            raise ValueError(f"a corpus needs at least one open file, not {max_open}")
        self.directory = directory
        self.index = index
        self.max_open = max_open
        self.dtype = numpy_dtype(index.dtype)
        self._starts = index.starts()
        self._open: OrderedDict[int, int] = OrderedDict()
        self._most_open = max_open  # None until a file is opened, by the process that reads
        self._worked, self._read_before = worked, set[int]()

    @classmethod
    def open(
        cls, directory: str | Path, max_open: int | None = None, worked: bool = False
    ) -> Corpus:
        """Read the index; the shards are opened, and checked against it, when they are needed.
        Raises as `read_index`."""
        return cls(Path(directory), read_index(Path(directory), worked), max_open, worked)

    def reopened(self, max_open: int | None = None) -> Corpus:
        return Corpus(self.directory, self.index, max_open, self._worked)

    def samples(self, seq_len: int) -> int:
        """How many samples there are; DataError if there are none."""
        return sample_count(self.index, seq_len)

    def sample(
        self,
        number: int,
        seq_len: int,
        *,
        worked: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> Tokens:
        """Sample [seq_len + 1]: inputs are all but the last token, targets all but the first.
        Raises IndexError beyond the last sample, and as `read`."""
        return self.read(number * seq_len, seq_len + 1, worked=worked, stop=stop)

    def read(
        self,
        start: int,
        count: int,
        *,
        worked: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> Tokens:
        """Tokens [count] from position `start` of the stream on, across shards.

        `worked` is whether another process is known to have read them before, `stop` whether a wait
        for storage is to end. Raises IndexError outside the stream; DataError, naming the shard, if
        it is missing or not the file that the index describes; and as `StorageWaits.retry` where it
        cannot be read now.
        """
        try:
            return storage_waits().retry(
                partial(self.read_now, start, count), lambda: worked or self.worked_before(), stop
            )
        except OSError as error:
            words = f"token file {error.filename} cannot be read: {error.strerror}"
            raise DataError(words) from error

    def read_now(self, start: int, count: int) -> Tokens:
        """The same, in one try: whatever cannot be read raises the `OSError`, with its file."""
        if start < 0 or count < 0 or start + count > self.index.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.index.tokens}")
        out = np.empty(count, self.dtype)
        number = bisect_right(self._starts, start) - 1
        filled = 0
        while filled < count:
            offset = start + filled - self._starts[number]
            here = min(count - filled, self.index.shards[number].tokens - offset)
            self._read_shard(number, offset, out[filled : filled + here])
            filled += here
            number += 1
        return out

    def documents(self, start: int, count: int) -> list[int]:
        """Where the documents begin that tokens [count] from `start` on are of: positions of the
        stream, the first of them at or before `start`. Raises as `read`."""
        found = self._beginnings(start, count)
        first = start if found[:1] != [start] else 0
        while first > 0:
            below = max(0, first - _SEARCHED)
            if earlier := self._beginnings(below, first - below):
                return [earlier[-1], *found]
            first = below
        return found

    def _beginnings(self, start: int, count: int) -> list[int]:
        """Where documents begin within a stretch of tokens."""
        if self.index.kind != "text":
            flagged = np.flatnonzero(self.read(start, count) & BEGINS)
            return [start + place for place in flagged.tolist()]
        first = max(start - 1, 0)
        ended = np.flatnonzero(self.read(first, start + count - 1 - first) == self.index.eot)
        return [0] * (start == 0) + [first + 1 + place for place in ended.tolist()]

    def worked_before(self) -> bool:
        """Whether this run has read any shard before. Before it has, it is not the shard's fault if
        the index beside it cannot be seen."""
        if self._worked or self._read_before:
            return True
        return not os.access(self.directory / INDEX_FILE, os.R_OK)

    def close(self) -> None:
        """Close all files; they are opened again when needed."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __reduce__(self) -> tuple[type[Corpus], tuple[Path, Index, int | None, bool]]:
        return Corpus, (self.directory, self.index, self.max_open, self._worked)

    def _read_shard(self, number: int, offset: int, into: Tokens) -> None:
        path = self.directory / self.index.shards[number].file
        position, memory = _HEADER.size + offset * into.itemsize, into.view(np.uint8).data
        try:
            if (descriptor := self._open.get(number)) is None:
                descriptor = self._open_another(number, path)
            else:
                self._open.move_to_end(number)
            if (got := os.preadv(descriptor, [memory], position)) < len(memory):
                _read_fully(path, descriptor, memory[got:], position + got)
        except OSError as error:
            self._drop(number)  # a descriptor that went stale stays so: the next try opens the file
            code = error.errno
            if code == errno.ENOENT and not (self._worked or number in self._read_before):
                code = errno.ENODATA  # as with an empty file: it may never have been there
            raise OSError(code, error.strerror, str(path)) from error
        self._read_before.add(number)

    def _drop(self, number: int) -> None:
        if (descriptor := self._open.pop(number, None)) is not None:
            with suppress(OSError):  # of a server that has forgotten it
                os.close(descriptor)

    def _open_another(self, number: int, path: Path) -> int:
        if self._most_open is None:
            self._most_open = files_to_spare()
        if len(self._open) >= self._most_open:
            self._close_oldest()
        shard, dtype = self.index.shards[number], self.index.dtype
        try:
            self._open[number] = _open_shard(path, shard, dtype)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
            self._most_open = len(self._open)  # the others of this process need files, too
            self._close_oldest()
            self._open[number] = _open_shard(path, shard, dtype)
        return self._open[number]

    def _close_oldest(self) -> None:
        os.close(self._open.popitem(last=False)[1])


def verify_shard(directory: Path, shard: Shard, dtype: Dtype) -> None:
    """Read a token file through. DataError, naming it, if it is not what the index says. Raises as
    `StorageWaits.retry` where it cannot be read now."""
    path = directory / shard.file
    try:
        checksum = storage_waits().retry(partial(_sum, path, shard, dtype), path=path)
    except OSError as error:
        raise DataError(f"token file {path} cannot be read: {error.strerror}") from error
    if checksum != shard.checksum:
        raise DataError(
            f"{path} is damaged: its tokens have the checksum {checksum}, "
            f"the index says {shard.checksum}; prepare the data again into another directory"
        )


def verify(directory: str | Path) -> Index:
    """Read every token file of a prepared directory through, and return its index. Raises
    DataError, naming the first file that is not what the index says."""
    index = read_index(Path(directory))
    for shard in index.shards:
        verify_shard(Path(directory), shard, index.dtype)
    return index


def _sum(path: Path, shard: Shard, dtype: Dtype) -> str:
    """The checksum of a file's tokens. Raises `OSError` if they cannot be read."""
    checksum, block = xxh3_128(), bytearray(_BLOCK)
    with open(_open_shard(path, shard, dtype), "rb") as file:
        for start in range(_HEADER.size, shard.bytes, _BLOCK):
            part = memoryview(block)[: min(_BLOCK, shard.bytes - start)]
            _read_fully(path, file.fileno(), part, start)
            checksum.update(part)
    return checksum.hexdigest()


def _open_shard(path: Path, shard: Shard, dtype: Dtype) -> int:
    """A descriptor of the file that the index describes; DataError if it is another. Raises
    `OSError` if it cannot be read, or is empty."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            raise empty(path)
        header = bytearray(min(size, _HEADER.size))
        _read_fully(path, descriptor, memoryview(header), 0)
        if refusal := _mismatch(bytes(header), size, shard, dtype):
            raise DataError(f"token file {path} is not the one its index describes: {refusal}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mismatch(header: bytes, size: int, shard: Shard, dtype: Dtype) -> str:
    """What is wrong with a file of this header and size in bytes; empty if nothing is."""
    if len(header) < _HEADER.size:
        return f"it has {size} bytes, the index says {shard.bytes}"
    magic, item_size, _, tokens, digest = _HEADER.unpack(header)
    if magic != _MAGIC:
        return f"it starts with {magic!r}, a token file starts with {_MAGIC!r}"
    if item_size != _ITEM_SIZES[dtype]:
        held = f"uint{8 * item_size}" if item_size in _ITEM_SIZES.values() else f"type {item_size}"
        return f"it holds {held} tokens, the index says {dtype}"
    if tokens != shard.tokens:
        return f"it holds {tokens} tokens, the index says {shard.tokens}"
    if digest.hex() != shard.checksum:
        return f"its checksum is {digest.hex()}, the index says {shard.checksum}"
    if size != shard.bytes or size != _HEADER.size + tokens * item_size:
        return (
            f"it has {size} bytes, the index says {shard.bytes}, "
            f"its header {_HEADER.size + tokens * item_size}"
        )
    return ""


def _read_fully(path: Path, descriptor: int, into: memoryview, position: int) -> None:
    """Fill `into` from `position` on; a network file system may give less than was asked for."""
    filled = 0
    while filled < len(into):
        got = os.preadv(descriptor, [into[filled:]], position + filled)
        if got == 0:
            _refuse_short(path, descriptor, position + filled, position + len(into))
        filled += got


def _refuse_short(path: Path, descriptor: int, at: int, end: int) -> NoReturn:
    """Nothing was read at byte `at`: the file is shorter than it was, or only seems so."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        raise empty(path)
    if size > at:
        raise OSError(errno.EIO, f"nothing was read at byte {at} of {size}", str(path))
    raise DataError(
        f"token file {path} was truncated while in use: it ends at byte {at}, {end} were expected"
    )
