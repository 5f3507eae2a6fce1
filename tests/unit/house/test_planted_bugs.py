"""Every planted bug has its line in kempner, and its tests are there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted.bugs import Bug, Length, faults, length_of, read_bugs, read_sources
from simulated.checks import mutants as world
from simulated.rank_order import mutants as rank_order

GOOD = read_bugs()[0]


def test_every_bug_can_be_planted_and_its_tests_are_there() -> None:
    assert faults(read_bugs(), read_sources()) == []


@pytest.mark.parametrize(
    "mutant", [*world.MUTANTS, *rank_order.MUTANTS], ids=lambda mutant: mutant.what
)
def test_every_mutant_of_a_simulation_can_be_planted(
    mutant: world.Mutant | rank_order.Mutant,
) -> None:
    with mutant.planted():
        pass


@pytest.mark.parametrize(
    ("bugs", "expected"),
    [
        ([GOOD, GOOD], "there are 2 of this id"),
        ([replace(GOOD, old="this is nowhere")], "`old` is there 0 times (nowhere)"),
        ([replace(GOOD, old="import annotations")], " times ("),
        ([replace(GOOD, new="if (:")], "invalid syntax"),
        ([replace(GOOD, new=GOOD.old)], "it changes nothing"),
        ([replace(GOOD, tests=())], "it names no test"),
        ([replace(GOOD, tests=("tests/unit/nowhere.py::test_it",))], "there is no tests/unit/now"),
        ([replace(GOOD, tests=(f"{GOOD.tests[0]}_at_all[1]",))], "_at_all[1]"),
    ],
)
def test_what_is_wrong_with_the_list_is_said(bugs: list[Bug], expected: str) -> None:
    (said,) = faults(bugs, read_sources())
    assert said.startswith(f"{GOOD.id}: ")
    assert expected in said


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/unit/house/test_sizes.py", Length.TEST),
        ("tests/unit/house/test_sizes.py::test_a_class_name_serves_once", Length.TEST),
        ("tests/slurm/faults/test_kill_drill.py", Length.LONG),
        ("tests/slurm/faults/test_orphans.py", Length.LONG),
    ],
)
def test_which_command_runs_a_test(test: str, expected: Length) -> None:
    assert length_of(test) is expected
