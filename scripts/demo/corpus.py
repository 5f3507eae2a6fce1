"""Write the demo's corpus: real English that every Python installation carries.

    python scripts/demo/corpus.py OUT

The texts are the topics of Python's own reference (`pydoc_data.topics`) and the docstrings of the
standard library, read with `ast`, so that no module is imported. A topic is a document, and so are
all docstrings of one module. About one document in twenty, chosen by a hash of its name, goes to
OUT/held_out, the others to OUT/train. The same Python gives the same files.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from pydoc_data.topics import topics

SKIPPED = {"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
"""Folders of the standard library that are tests, applications, or not part of it."""

SHORTEST = 120
"""Docstrings of fewer characters are left out: they say little more than a name does."""

HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Document:
    """A text and the name of the file that it becomes."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document is for evaluation; depends on its name alone."""
        digest = blake2b(self.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def documents(library: Path) -> Iterator[Document]:
    """All documents, in an order that depends on names alone.

    A docstring that is repeated, in its own module or in another, is used once.
    """
    for name in sorted(topics):
        yield Document(f"topic.{name}", topics[name].strip() + "\n")
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if SKIPPED.isdisjoint(place.parts):
            fresh = [text for text in docstrings(path) if text not in seen]
            seen.update(fresh)
            if fresh:
                name = ".".join(place.with_suffix("").parts)
                yield Document(f"module.{name}", "\n\n".join(dict.fromkeys(fresh)) + "\n")


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a source file that are long enough, in the order of the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other people's escape sequences
        tree = ast.parse(path.read_bytes())
    owners = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in sorted(owners, key=lambda node: getattr(node, "lineno", 0)):
        text = (ast.get_docstring(node) or "").strip()
        if len(text) >= SHORTEST:
            yield text


def write(out: Path, library: Path) -> dict[str, tuple[int, int]]:
    """Write the two folders; what was in them is replaced.

    Returns:
        For "train" and "held_out", the number of documents and of bytes.
    """
    sizes = {"train": (0, 0), "held_out": (0, 0)}
    for folder in sizes:
        (out / folder).mkdir(parents=True, exist_ok=True)
        for stale in (out / folder).glob("*.txt"):
            stale.unlink()
    for document in documents(library):
        folder = "held_out" if document.held_out else "train"
        content = document.text.encode("utf-8", "replace")
        (out / folder / f"{document.name}.txt").write_bytes(content)
        count, size = sizes[folder]
        sizes[folder] = (count + 1, size + len(content))
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write train/ and held_out/ to")
    out: Path = parser.parse_args().out
    for folder, (count, size) in write(out, Path(sysconfig.get_path("stdlib"))).items():
        print(f"{out / folder}: {count} documents, {size:,} bytes")


if __name__ == "__main__":
    main()
