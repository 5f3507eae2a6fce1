"""Nothing in the house is too large to take in at a glance."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TREES = ("kempner", "tests", "benchmarks", "scripts")

LINES = 600
"""The longest a module may be: it is a subject, and not split to please a count."""

MODULES = 18
"""The most modules in one folder, `__init__` not counted."""

ATTRIBUTES = 13
"""The most attributes that a class may have."""

PARAMETERS = 10
"""The most parameters that its constructor may take."""

CONFIGURATION = {"Shape": "the model's section of the configuration, with all that follows from it"}
"""Classes that may have more, because they hold what a configuration says; and all `Section`s."""


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


def test_no_class_is_too_large() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {node.name}": (attributes, parameters)
        for path in modules()
        if path.is_relative_to(ROOT / "kempner")
        for node, attributes, parameters in _classes(ast.parse(path.read_text()))
        if attributes > ATTRIBUTES or parameters > PARAMETERS
    }
    assert found == {}


def test_a_class_that_is_too_large_would_be_seen() -> None:
    fields = "".join(f"    a{n}: int\n" for n in range(9))
    record = f"@dataclass(frozen=True)\nclass Record:\n{fields}"
    sets = "".join(f"        self.a{n} = n\n" for n in range(14))
    holder = f"class Holder:\n    def __init__(self, n):\n{sets}"
    (_, *of_record), (_, *of_holder) = _classes(ast.parse(record + holder))
    assert (of_record, of_holder) == ([9, 9], [14, 1])


def _classes(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, int, int]]:
    """Each class with the number of its attributes, and of its constructor's parameters."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name in CONFIGURATION:
            continue
        if "Section" in map(ast.unparse, node.bases):
            continue
        fields = {
            entry.target.id
            for entry in node.body
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
            if "ClassVar" not in ast.unparse(entry.annotation)
        }
        methods = [entry for entry in node.body if isinstance(entry, ast.FunctionDef)]
        assigned = {
            found.attr
            for method in methods
            for found in ast.walk(method)
            if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store)
            if ast.unparse(found.value) == "self"
        }
        made = [method.args for method in methods if method.name == "__init__"]
        parameters = sum(len(args.args) - 1 + len(args.kwonlyargs) for args in made)
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            parameters = len(fields)
        yield node, len(fields | assigned), parameters
