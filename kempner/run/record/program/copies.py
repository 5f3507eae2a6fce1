"""Keeps a copy of the program's files with the run, as far as git tracks them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from kempner.run.output.logs import logger
from kempner.run.record.program.files import read_small
from kempner.run.record.run_dir import RunDirectory

_WITHIN = 10.0
"""Seconds that git gets to list its files."""


def keep_copies(run: RunDirectory, files: Mapping[str, Path]) -> None:
    """Copy each file that git tracks to `program/` of the run, once for each content.

    They are for the owner alone. Files that are hidden, or large, are left out; one that cannot be
    copied is told, and no reason to stop.
    """
    wanted: dict[Path, Path] = {}
    contents: dict[Path, bytes] = {}
    for name, path in files.items():
        content = None if _is_hidden(name) else read_small(path)
        if content is not None:
            copy = run.program / f"{blake2b(content, digest_size=6).hexdigest()}-{path.name}"
            if not copy.exists():
                wanted[path], contents[path] = copy, content
    try:
        for path in _tracked(list(wanted)):
            _write(wanted[path], contents[path])
    except OSError as error:
        logger().warning("cannot keep a copy of the program", error=str(error))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in Path(name).parts)


def _tracked(paths: Sequence[Path]) -> list[Path]:
    """Those of these files that git tracks; none without git."""
    by_name = {str(path): path for path in paths}
    if not by_name:
        return []
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    command = ["git", "-C", str(folder), "ls-files", "-z", "--", *by_name]
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(command, capture_output=True, timeout=_WITHIN, check=False).stdout
        names = [str(folder / os.fsdecode(name)) for name in listed.split(b"\0") if name]
        return [by_name[name] for name in names if name in by_name]
    return []


def _write(copy: Path, content: bytes) -> None:
    """Another start may do the same at this moment."""
    copy.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    temporary.rename(copy)
