"""Reads files that a manifest lists: whether one is damaged, or only cannot be read now."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kempner.checkpoint.format.names import MANIFEST
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import storage_waits

R = TypeVar("R")


def read_listed(path: Path, work: Callable[[], R]) -> R:
    """What `work` returns, which opens and reads a file that its checkpoint's manifest lists.

    The file was there when the manifest was written. So it is missing only if the manifest can
    still be seen beside it; otherwise the folder is away. Raises `DataError` if it is missing, or
    empty and stays so, and as `StorageWaits.retry` where it cannot be read now.
    """

    def once() -> R:
        try:
            return work()
        except FileNotFoundError as error:
            if os.access(path.with_name(MANIFEST), os.F_OK):
                raise DataError(f"cannot be read: {error.strerror}") from error
            raise

    try:
        return storage_waits().retry(once, worked=True, path=path)
    except OSError as error:
        words = "" if error.errno == errno.ENODATA else "cannot be read: "
        raise DataError(f"{words}{error.strerror}") from error
