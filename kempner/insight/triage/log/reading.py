"""The lines of a log of any size, in bounded memory."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

BLOCK = 1 << 20
"""Bytes read at a time."""

LONGEST = 8192
"""Bytes of a line that are looked at. A longer one holds no sentence for a person."""

_BREAK = re.compile(rb"\r\n|\n|\r")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BOX = re.compile(r"^[\s│┃|]*[│┃]\s?|\s*[│┃]\s*$")


def read_log(path: Path) -> Iterator[str]:
    """Its lines without colours; what a progress bar overwrites counts as lines, too.

    Raises `OSError` if it cannot be read.
    """
    with path.open("rb") as file:
        content: IO[bytes] = file
        if path.suffix == ".gz":
            content = cast(IO[bytes], gzip.GzipFile(fileobj=file))
        for line in _split(content):
            yield _plain(line)


def _split(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while block := file.read(BLOCK):
        *lines, rest = _BREAK.split(rest + block)
        yield from lines
        rest = rest[:LONGEST]
    if rest:
        yield rest


def _plain(line: bytes) -> str:
    text = line[:LONGEST].decode("utf-8", errors="replace").rstrip()
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    return _BOX.sub("", text) if "│" in text or "┃" in text else text
