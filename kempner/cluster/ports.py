"""A port on which rank 0 can host the rendezvous."""

from __future__ import annotations

import socket
import zlib

FIRST, LAST = 15_000, 32_000
"""Below Linux's ephemeral range, so that no outgoing connection takes the port in between."""


def free_port(address: str, salt: str) -> int:
    """A port on `address` (of this machine) that nobody listens on.

    The search starts at a place derived from `salt`, so that two runs that look at the same moment
    look at different ports. Raises `OSError` if none is free.
    """
    start = zlib.crc32(salt.encode())
    for offset in range(LAST - FIRST):
        port = FIRST + (start + offset) % (LAST - FIRST)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {FIRST} and {LAST} on {address}")
