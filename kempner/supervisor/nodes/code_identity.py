"""Which code a node runs: a hash of kempner's own files, the versions of its Python and torch."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]

_SHOWN = 8
"""Digits of a hash that a sentence shows."""


@dataclass(frozen=True)
class CodeIdentity:
    """`python` and `torch` are versions, that of torch empty where there is none; `code` is a hash
    of kempner's files, hexadecimal."""

    python: str
    code: str
    torch: str = ""

    def __str__(self) -> str:
        torch = f", torch {self.torch}" if self.torch else ""
        return f"kempner's code {self.code[:_SHOWN]} on Python {self.python}{torch}"


def code_identity(package: Path = _PACKAGE) -> CodeIdentity:
    """Of this process. Raises `OSError` if the package's files cannot be read."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package)}\0{len(content)}\0".encode())
        total.update(content)
    return CodeIdentity(platform.python_version(), total.hexdigest(), _torch())


def _torch() -> str:
    """As it is installed: importing it would take seconds."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def other_code(found: Mapping[str, CodeIdentity], first: str) -> dict[str, str]:
    """The nodes whose code is not that of most, each with a sentence.

    Of several that as many have, that of the `first` node counts.
    """
    if len(set(found.values())) < 2:
        return {}
    counts = Counter(found.values())
    usual = max(counts, key=lambda code: (counts[code], code == found.get(first)))
    return {
        node: f"it runs {code}, and the other nodes {usual}"
        for node, code in found.items()
        if code != usual
    }
