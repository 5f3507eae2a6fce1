"""Resource limits of a process."""

from __future__ import annotations

import resource
from pathlib import Path

_RESERVE = 256  # for connections, checkpoints and logs that come later


def raise_open_file_limit() -> None:
    """A connection per rank: the usual soft limit of 1,024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def files_to_spare() -> int:
    """How many files this process may open and keep open, with some left for all else; at least 1.

    It counts what is open now.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = soft - len(list(Path("/proc/self/fd").iterdir()))
    return max(1, free // 2, free - _RESERVE)
