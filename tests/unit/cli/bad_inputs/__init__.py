"""Bad and odd command lines, as a table: what is typed, what is there, and what is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = None
"""In `Row.files`: a folder."""


@dataclass(frozen=True)
class Link:
    """In `Row.files`: a symbolic link."""

    to: str


Content = str | bytes | Link | None


@dataclass(frozen=True)
class Row:
    """One bad input.

    `command` follows the word `kempner`, as a shell would split it, or split already. `words` are
    in the sentence; three dots stand for anything between them. `files` are made first, in place of
    those of `template` that have their names. `on_stdout` is for commands that report their
    findings there.
    """

    command: str | tuple[str, ...]
    words: str
    code: int = 2
    files: Mapping[str, Content] = field(default_factory=dict)
    on_stdout: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


TEMPLATE: Mapping[str, Content] = {
    "x.toml": "",
    "ok.py": "print(1)\n",
    "file": "",
    "folder": FOLDER,
    "loop": Link("loop"),
    "dangling": Link("nowhere"),
    "text.txt": "some text\n",
    "docs.jsonl": '{"text": "some text"}\n',
}
"""What is there for every row, beside `run`, a run with checkpoints of the steps 10 and 20."""

LONG = "n" * 300
"""Longer than any file system's names."""


def make(folder: Path, files: Mapping[str, Content]) -> None:
    """Make what a row needs in `folder`; what is in the way goes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.is_file():
            path.unlink()
        match content:
            case None:
                path.mkdir()
            case Link(to):
                path.symlink_to(to)
            case bytes():
                path.write_bytes(content)
            case str():
                path.write_text(content)
