"""Lines of a program that make two of its runs differ by themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_CLOCKS = {"time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today"}
_OWN_ENTROPY = {"urandom", "uuid4", "uuid1", "token_bytes", "token_hex", "randbits", "getpid"}
_SEEDED = {"default_rng", "RandomState", "Random", "SeedSequence"}
_FILES = {"listdir", "scandir", "glob", "rglob", "iterdir", "iglob"}


@dataclass(frozen=True)
class Hint:
    """A line, and what it does."""

    place: str
    what: str
    kind: str

    @property
    def words(self) -> str:
        """For a person."""
        return f"{self.place} {self.what}"


def find_hints(sources: Mapping[str, str]) -> list[Hint]:
    """What is found in sources by the names of their files."""
    return [hint for name, text in sources.items() for hint in _hints(name, text)]


def _hints(name: str, text: str) -> Iterator[Hint]:
    tree = ast.parse(text)
    sorted_calls = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node) == "sorted"
        for argument in node.args
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, place = _called(node), f"{name}:{node.lineno}"
        if called in _CLOCKS and not node.args:
            yield Hint(place, "reads the clock (time)", "clock")
        elif called in _OWN_ENTROPY:
            yield Hint(place, f"takes what differs in each process ({called})", "seed")
        elif called in _SEEDED and not node.args and not node.keywords:
            yield Hint(place, f"draws without a seed ({called})", "seed")
        elif called in _FILES and id(node) not in sorted_calls:
            yield Hint(place, f"takes files in the order of their folder ({called})", "files")
        elif called == "hash":
            yield Hint(place, "calls hash(), which differs in each process", "hash")


def _called(node: ast.Call) -> str:
    func = node.func
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""
