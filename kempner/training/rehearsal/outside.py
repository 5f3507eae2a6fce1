"""What a rehearsed program does outside of its run: files that it opens, hosts that it calls."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
MOST = 500
"""Names that are kept of each kind."""


class Outside:
    """Keeps the names of files and hosts, from when `watch` is called to the end of the process."""

    def __init__(self, inside: Path) -> None:
        self._inside = f"{inside}/"
        self.written: dict[str, None] = {}
        self.read: dict[str, None] = {}
        self.called: dict[str, None] = {}

    def watch(self) -> None:
        """Have Python tell of each file and connection; it cannot be undone."""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            unnamed = flags & os.O_TMPFILE == os.O_TMPFILE
            if isinstance(path, str | bytes | os.PathLike) and not unnamed:
                self.opened(os.fsdecode(path), bool(flags & _WRITES))
        elif event == "socket.connect":
            address = arguments[1]
            if isinstance(address, tuple) and len(address) > 1:
                self._call(str(address[0]), address[1])

    def opened(self, path: str, for_writing: bool) -> None:
        """A file is opened."""
        full = os.path.abspath(path)  # noqa: PTH100 - links stay as they are written
        if full.startswith((self._inside, *_NOT_FILES)) or full.endswith((".py", ".pyc", ".so")):
            return
        names = self.written if for_writing else self.read
        if len(names) < MOST and not Path(full).is_dir():  # where a file without a name is opened
            names[full] = None

    def _call(self, host: str, port: int) -> None:
        if not host.startswith("127.") and host not in ("::1", "localhost", "0.0.0.0", "::"):
            self.called[f"{host}:{port}"] = None
