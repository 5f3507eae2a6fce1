"""Which tests start their processes by the real commands, where the others fork them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]

WHOLE_RUNS = (
    "distributed/stops/test_stop_and_resume.py"
    "::test_a_second_ctrl_c_leaves_at_once_and_a_killed_supervisor_loses_nothing",
    "distributed/stops/test_stop_and_resume.py::test_under_torchrun",
    "distributed/stops/test_lone_rank.py::test_ctrl_c_in_a_giant_batch",
    "drills/runs/test_kills_and_restarts.py::test_kills_at_any_moment_heal_in_place",
)
"""Whole runs that stay cold for its own sake: what people do is tested as they do it.

So is what they do in a terminal, since a shell starts that: distributed/stops/test_terminals.py.
"""


def marked(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The functions of a file that are marked as cold, "" for all of them, and the marks."""
    for node in tree.body:
        name = node.name if isinstance(node, ast.FunctionDef) else ""
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.cold":
                yield name, call


def test_a_share_of_the_tests_is_cold_and_each_says_why() -> None:
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, call in marked(ast.parse(path.read_text())):
            found[f"{path.relative_to(TESTS)}::{name}"] = [ast.literal_eval(a) for a in call.args]
    assert all(len(reasons) == 1 and reasons[0] for reasons in found.values()), found
    assert found.keys() >= set(WHOLE_RUNS)
    assert len(found) >= 7, found
