"""Resource limits of a process."""

from __future__ import annotations

import resource


def raise_open_file_limit() -> None:
    """A connection per rank: the usual soft limit of 1,024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
