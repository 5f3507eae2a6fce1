"""What the tasks of a step print about their nodes, in lines that srun passes on whole.

Lines of up to 1,024 bytes stay as they are. Pieces of longer ones come between those of other
tasks.
"""

from __future__ import annotations

import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable

_PIECE = 700
"""Bytes of an answer on one line; node and numbers come before them."""

_LINE = re.compile(r"(\S+) (\d+)/(\d+) ([\w+/=]+)", re.ASCII)


def in_lines(node: str, answer: bytes) -> str:
    """An answer of any length, from a task on this node."""
    packed = b64encode(zlib.compress(answer)).decode()
    pieces = [packed[at : at + _PIECE] for at in range(0, len(packed), _PIECE)]
    many = len(pieces)
    return "".join(f"{node} {number}/{many} {piece}\n" for number, piece in enumerate(pieces, 1))


def whole_answers(lines: Iterable[str]) -> list[bytes]:
    """The answers among the lines of all tasks, which may come in any order; what is not whole, or
    is something else, is left out."""
    found: dict[tuple[str, int], dict[int, str]] = {}
    for line in lines:
        if piece := _LINE.fullmatch(line):
            found.setdefault((piece[1], int(piece[3])), {})[int(piece[2])] = piece[4]
    whole = [
        "".join(pieces[number] for number in sorted(pieces))
        for (_, many), pieces in found.items()
        if len(pieces) == many
    ]
    return [answer for packed in whole if (answer := _unpack(packed)) is not None]


def _unpack(packed: str) -> bytes | None:
    try:
        return zlib.decompress(b64decode(packed))
    except (ValueError, zlib.error):
        return None
