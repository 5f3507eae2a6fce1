"""Connections of this node through which nothing passes any more, as the kernel tells it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_RETRIES = 2
"""Times that the same data was sent again in vain; a single loss is everyday."""


def stalled_connections(tables: tuple[Path, ...] = _TABLES) -> list[tuple[str, str]]:
    """Near and far address of each TCP connection whose data the other side does not acknowledge.

    Of all processes of this network namespace; no privilege is needed. Raises `OSError` if the
    kernel does not show them.
    """
    return [ends for table in tables for ends in _stalled(table.read_text())]


def _stalled(table: str) -> Iterator[tuple[str, str]]:
    """From the text of a table (proc(5)): `retrnsmt` counts the timeouts since the last answer."""
    for line in table.splitlines()[1:]:
        _, near, far, _, _, _, retransmits, *_ = line.split()
        if int(retransmits, 16) >= _RETRIES:
            yield _address(near), _address(far)


def _address(end: str) -> str:
    """The address of `HEX:PORT`, in words of four bytes in this host's order."""
    digits = end.partition(":")[0]
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(packed) == 4:
        return str(IPv4Address(packed))
    address = IPv6Address(packed)
    return str(address.ipv4_mapped or address)
