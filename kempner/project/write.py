"""Reads the templates, and writes a project into a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from errno import ENOTDIR
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from kempner.run.process.exit_codes import UsageError, cannot_write

_EXECUTABLE = ".sh"


def read_templates() -> dict[str, str]:
    """The text of each template, by its path in a project."""
    return dict(_walk(files("kempner.project") / "template", ""))


def _walk(folder: Traversable, at: str) -> list[tuple[str, str]]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            if entry.name != "__pycache__":
                found += _walk(entry, f"{at}{entry.name}/")
        else:
            found.append((f"{at}{entry.name}", entry.read_text("utf-8")))
    return found


def write_project(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write the files into a folder that is new, or holds nothing but hidden files.

    Returns the names of those that were there before, which are left as they are. What was written
    is taken away again if not all can be. Raises `UsageError` and as `cannot_write`.
    """
    written: list[Path] = []
    kept: list[str] = []
    made: list[Path] = []
    try:
        _refuse_if_used(folder)
        _make_folder(folder, made)
        for name, text in texts.items():
            path = folder / name
            _make_folder(path.parent, made)
            try:
                with open(path, "x", encoding="utf-8") as file:
                    written.append(path)
                    file.write(text)
            except FileExistsError:
                kept.append(name)
                continue
            if path.suffix == _EXECUTABLE:
                path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        _take_back(written, made)
        raise cannot_write(error.filename or folder, error) from error
    return kept


def _refuse_if_used(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; name a new or an empty one")
    there = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if there:
        raise UsageError(f"{folder} is not empty: {there[0]} is there; name a new or an empty one")


def _make_folder(folder: Path, made: list[Path]) -> None:
    """Make a folder and those above it; `made` gets what was not there before."""
    if folder.is_dir():
        return
    if folder.exists():
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(folder))
    _make_folder(folder.parent, made)
    folder.mkdir()
    made.append(folder)


def _take_back(written: list[Path], made: list[Path]) -> None:
    for path in reversed(written):
        path.unlink(missing_ok=True)
    for folder in reversed(made):
        folder.rmdir()
