"""The list of planted bugs, bugs.toml: where each belongs, and which commands run its tests.

A bug is found by its text, and not by the name of a file: modules may be moved and renamed as long
as the line that decides stays the same.

    [[bug]]
    id = "checkpoint-..."       the part of kempner comes first
    what = "..."                what goes wrong for the user of kempner
    old = '''...'''             is there exactly once in kempner/**/*.py
    new = '''...'''             what stands in its place
    tests = ["..."]             arguments for pytest, the cheapest first
    survives = true             only where no test at all catches it; why not, says a comment
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from lengths import read_chosen, read_costs
from promises_kept import function_of

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).with_name("bugs.toml")


@dataclass(frozen=True)
class Bug:
    """See above."""

    id: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: bool = False

    def planted_in(self, text: str) -> str:
        """The text of its file with the bug."""
        return text.replace(self.old, self.new)


class Length(Enum):
    """The shortest command that runs a test."""

    TEST = "make test"
    CHECK = "make check"
    LONG = "make long"


def read_bugs(only: Sequence[str] = ()) -> list[Bug]:
    """All bugs of the list, or those that are asked for."""
    entries = tomllib.loads(BUGS.read_text())["bug"]
    bugs = [Bug(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    if unknown := set(only) - {bug.id for bug in bugs}:
        raise SystemExit(f"not in the list: {', '.join(sorted(unknown))}")
    return [bug for bug in bugs if not only or bug.id in only]


def read_sources(root: Path = ROOT) -> dict[Path, str]:
    """The text of each module of kempner."""
    return {file: file.read_text() for file in sorted(root.glob("kempner/**/*.py"))}


def place(bug: Bug, sources: Mapping[Path, str]) -> Path:
    """The file that the bug belongs to. Raises `SystemExit` unless there is exactly one."""
    found = {file: number for file, text in sources.items() if (number := text.count(bug.old))}
    if (times := sum(found.values())) != 1:
        where = ", ".join(file.name for file in found) or "nowhere"
        raise SystemExit(f"{bug.id}: `old` is there {times} times ({where})")
    return next(iter(found))


def faults(bugs: Sequence[Bug], sources: Mapping[Path, str]) -> list[str]:
    """Why bugs of the list cannot be planted or tested, a sentence each."""
    count = Counter(bug.id for bug in bugs)
    said = [
        f"{name}: there are {number} of this id" for name, number in count.items() if number > 1
    ]
    for bug in bugs:
        try:
            file = place(bug, sources)
            compile(bug.planted_in(sources[file]), str(file), "exec")
        except (SystemExit, SyntaxError) as error:
            said.append(str(error) if isinstance(error, SystemExit) else f"{bug.id}: {error}")
        if bug.old == bug.new:
            said.append(f"{bug.id}: it changes nothing")
        if not bug.tests:
            said.append(f"{bug.id}: it names no test")
        said += [f"{bug.id}: there is no {test}" for test in bug.tests if not _is_there(test)]
    return said


def length_of(test: str) -> Length:
    """The shortest command that runs all of `test`, a file or a function."""
    file, _, function = function_of(test).partition("::")
    known = _functions(file)
    if any(known[name] for name in ([function] if function else known)):
        return Length.LONG
    left_out = read_costs().keys() - set(read_chosen())
    named = [f"{file}::{name}" for name in ([function] if function else known)]
    return Length.CHECK if left_out & set(named) else Length.TEST


def _is_there(test: str) -> bool:
    file, _, function = function_of(test).partition("::")
    return (ROOT / file).is_file() and (not function or function in _functions(file))


@cache
def _functions(file: str) -> dict[str, bool]:
    """The test functions of a file, and whether each is a drill."""
    tree = ast.parse((ROOT / file).read_text())
    marks = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return {
        name: any("mark.drill" in mark for mark in marks)
        or any(ast.unparse(decorator) == "pytest.mark.drill" for decorator in node.decorator_list)
        for name, node in _tests_of(tree)
    }


def _tests_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef))
            yield from ((f"{node.name}::{n.name}", n) for n in inner if n.name.startswith("test"))
