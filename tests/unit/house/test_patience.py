"""No deadline of a test is in seconds of one machine: tests/patience.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import patience
import pytest
from harness import ROOT

LEAST = 5
"""Shorter ones are no deadlines, but how long nothing should come."""

SCALED = ("launch", "complete", "wait_until", "wait_for", "run")
"""Functions of the tests that take seconds of the reference machine themselves."""


def bare_deadlines(tree: ast.AST) -> Iterator[int]:
    """The lines with a call that waits for a plain number of seconds."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        owner = call.func.value
        ours = call.func.attr in SCALED and getattr(owner, "id", "") != "subprocess"
        values = [word.value for word in call.keywords if word.arg == "timeout" and not ours]
        if call.func.attr in ("join", "result", "settimeout"):
            values += call.args[:1]
        for value in values:
            number = getattr(value, "value", None)
            if isinstance(number, int | float) and number >= LEAST:
                yield call.lineno


def test_the_tests_wait_for_no_bare_number_of_seconds() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in bare_deadlines(ast.parse(path.read_text()))
    ]
    assert not found, f"write scaled(SECONDS) there: {', '.join(found)}"


@pytest.mark.parametrize(
    ("line", "bare"),
    [
        ("subprocess.run(command, timeout=60)", True),
        ("process.communicate(timeout=60.0)", True),
        ("thread.join(20)", True),
        ("future.result(30)", True),
        ("connection.settimeout(10)", True),
        ("thread.join(scaled(20))", False),
        ("worker.join(0.1)", False),
        ("' '.join(words)", False),
        ("cluster.run('login1', 'true', timeout=120)", False),
    ],
)
def test_what_is_a_bare_number_of_seconds(line: str, bare: bool) -> None:
    assert bool(list(bare_deadlines(ast.parse(line)))) == bare


@pytest.mark.parametrize(
    ("trial", "slowness"),
    [(0.1, 1.0), (1.0, 1.0), (2.5, 2.5), (19.0, 19.0), (500.0, patience.LARGEST)],
)
def test_a_slow_machine_gets_more_time_and_a_fast_one_no_less(
    monkeypatch: pytest.MonkeyPatch, trial: float, slowness: float
) -> None:
    monkeypatch.delenv(patience.SLOWNESS, raising=False)
    monkeypatch.setattr(patience, "_trial", lambda: trial * patience.REFERENCE)
    assert patience.scaled(10) == pytest.approx(10 * patience.RESERVE * slowness)
    monkeypatch.setattr(patience, "_trial", lambda: pytest.fail("it is measured once"))
    assert patience.slowness() == pytest.approx(slowness)


def test_a_worker_has_what_its_session_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patience.SLOWNESS, "4.00")
    assert patience.scaled(10) == 10 * patience.RESERVE * 4
