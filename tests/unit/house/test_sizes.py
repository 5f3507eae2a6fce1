"""Nothing in the house is too large to take in at a glance."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TREES = ("kempner", "tests", "benchmarks", "scripts")

LINES = 400
"""The longest a module may be."""

MODULES = 12
"""The most modules in one folder, `__init__` not counted."""


def modules() -> list[Path]:
    return [path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py"))]


def test_no_module_is_too_long() -> None:
    assert [p for p in modules() if len(p.read_text().splitlines()) > LINES] == []


@pytest.mark.parametrize("tree", TREES)
def test_no_folder_is_too_full(tree: str) -> None:
    folders = {path.parent for path in modules() if path.is_relative_to(ROOT / tree)}
    full = {f: n for f in folders if (n := len([*f.glob("[!_]*.py")])) > MODULES}
    assert folders
    assert full == {}
