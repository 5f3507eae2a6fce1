"""The house in numbers: modules are subjects, and a class name means one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
TREES = ("kempner", "tests", "benchmarks", "scripts")

LINES = 600
"""The longest a module may be: it is a subject, and not split to please a count."""

FUNCTION = 40
"""The most lines of a function, its signature and docstring included."""


def modules(tree: str) -> list[Path]:
    return sorted((ROOT / tree).rglob("*.py"))


def test_no_module_is_too_long() -> None:
    every = [path for tree in TREES for path in modules(tree)]
    assert every
    assert [p for p in every if len(p.read_text().splitlines()) > LINES] == []


def test_functions_fit_a_screen() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in modules("kempner")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION
    }
    assert found == set()


def test_a_class_name_serves_once() -> None:
    names = Counter(
        node.name
        for path in modules("kempner")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert len(names) > 100
    assert [name for name, times in names.items() if times > 1] == []
