"""`make test` is a choice that exercises every promise, computed from measured costs."""

from __future__ import annotations

import json
from typing import Any

import lengths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lengths import choose, dear, nearest, read_chosen, read_costs, witnesses
from promises_kept import read_promises

pytest_plugins = ["pytester"]


def test_the_choice_that_is_committed_is_the_one_that_is_computed() -> None:
    """If this fails: python tests/lengths.py."""
    assert read_chosen() == lengths.chosen_now()


def test_every_promise_is_exercised_on_ranks_or_on_slurm_where_it_can_be() -> None:
    left_out = read_costs().keys() - set(read_chosen())
    held = [entry for entry in read_promises() if witnesses(entry)]
    assert held
    assert [entry["id"] for entry in held if witnesses(entry) <= left_out] == []


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (["tests/unit/a.py::x"], {"tests/unit/a.py::x"}),
        (["tests/unit/a.py::x", "tests/slurm/b.py::y"], {"tests/slurm/b.py::y"}),
    ],
)
def test_a_test_on_ranks_is_the_better_witness(tests: list[str], expected: set[str]) -> None:
    assert witnesses({"id": "A1", "tests": tests}) == expected
    assert witnesses({"id": "A1", "tests": tests, "drill": True}) == frozenset()


_NAMES = [f"tests/slurm/t.py::test_{n}" for n in range(6)]


@given(
    st.lists(st.lists(st.sampled_from(_NAMES), min_size=1, unique=True), max_size=6),
    st.dictionaries(st.sampled_from(_NAMES), st.tuples(st.floats(1, 99), st.floats(3, 99))),
)
def test_a_choice_covers_everything_and_holds_nothing_superfluous(
    wanted: list[list[str]], costs: dict[str, Any]
) -> None:
    promises = [{"id": str(n), "tests": tests} for n, tests in enumerate(wanted)]
    chosen = set(choose(promises, costs))
    run = lambda chosen: [any(t in chosen or t not in costs for t in want) for want in wanted]  # noqa: E731
    assert all(run(chosen))
    assert chosen <= costs.keys()
    assert not any(all(run(chosen - {test})) for test in chosen)


@pytest.mark.parametrize(
    ("tests", "chosen"),
    [
        (["tests/a.py::dear[1]"], ["tests/a.py::dear"]),
        (["tests/a.py::cheap", "tests/a.py::dear"], []),
        (["tests/a.py::too_dear"], []),
        (["tests/a.py::too_dear", "tests/a.py::dear"], ["tests/a.py::dear"]),
    ],
)
def test_a_bug_is_noticed_where_that_is_not_too_dear(tests: list[str], chosen: list[str]) -> None:
    costs = {"tests/a.py::dear": (6.0, 12.0), "tests/a.py::too_dear": (9.6, 3.0)}
    assert choose([], costs, [tests]) == chosen


def test_the_cases_of_a_function_are_added_up() -> None:
    lines = [
        {"test": "a.py::x[1]", "cpu": 0.6, "seconds": 0.7},
        {"test": "a.py::x[2]", "cpu": 0.6, "seconds": 0.7},
        {"test": "a.py::waits", "cpu": 0.1, "seconds": 3.0},
        {"test": "a.py::cheap", "cpu": 0.9, "seconds": 2.9},
    ]
    assert dear(lines) == {"a.py::waits": (0.1, 3.0), "a.py::x": (1.2, 1.4)}


def test_the_tests_nearest_to_a_change() -> None:
    sources = {
        "tests/unit/test_a.py": "from kempner.run.ledger import read",
        "tests/unit/test_b.py": "from kempner.run import other, ledger",
        "tests/unit/test_c.py": "from kempner.run.ledgers import x",
        "tests/unit/test_d.py": "",
    }
    assert nearest(["kempner/run/ledger.py"], sources) == [
        "tests/unit/test_a.py",
        "tests/unit/test_b.py",
    ]
    assert nearest(["tests/unit/test_d.py", "README.md"], sources) == ["tests/unit/test_d.py"]
    assert nearest([], sources) == []


_THREE = """
def test_one():
    pass
def test_two():
    assert {two}
"""


def test_what_has_passed_at_this_commit_is_left_out_and_what_has_no_time_is_named(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        f"import sys; sys.path.append({str(lengths.TESTS)!r}); import lengths\n"
        "def pytest_addoption(parser): lengths.add_options(parser)\n"
        "def pytest_configure(config): lengths.watch(config)\n"
    )
    pytester.makepyfile(test_good=_THREE.format(two=True), test_bad=_THREE.format(two=False))
    record = pytester.path / "record.jsonl"
    run = lambda *options: pytester.runpytest_subprocess(f"--passed={record}", *options)  # noqa: E731
    run().assert_outcomes(passed=3, failed=1)
    run().assert_outcomes(failed=1, deselected=3)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert len({line["test"] for line in lines}) == len(lines) == 3
    record.write_text(json.dumps(lines[0] | {"commit": "another"}) + "\n")
    late = run("--until=1")
    late.assert_outcomes(skipped=4)
    late.stdout.fnmatch_lines(["*no time was left for*", "test_bad.py", "test_good.py"])
    assert len(record.read_text().splitlines()) == 1


def test_a_test_on_ranks_counts_as_dear_until_it_is_measured() -> None:
    new, cheap = "tests/slurm/t.py::test_that_is_new", "tests/unit/t.py::test_that_is_new"
    costs = read_costs([new, cheap])
    assert costs[new] == lengths.UNMEASURED
    assert cheap not in costs
