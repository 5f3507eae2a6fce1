"""From what was seen to a verdict, and to the sentences that explain it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rank_lines import STEPS, lines

from kempner.rehearse.compare import parse
from kempner.rehearse.rehearsal import Disturbance, ObservedStart, RehearsalRecord
from kempner.rehearse.report import report
from kempner.run.control.rehearsal import RehearsalPart
from kempner.run.process.exit_codes import ExitCode

TELLS = "for step in survive(model, optimizer):\n    best = min(best, 1)\n    print(best)\n"
USES = "for step in survive(model, optimizer):\n    if best < 1:\n        break\n"


def played(folder: Path, told: list[str], code: int = 75, kills: bool = False) -> ObservedStart:
    return ObservedStart(RehearsalPart(str(folder), "", 0, kills), (parse(told),), (code,), folder)


def seen(folder: Path, second: list[str], third: list[str], source: str = USES) -> RehearsalRecord:
    """Stopped after step 6, killed in step 12, and what the starts after that have told."""
    program = folder / "train.py"
    program.write_text(source)
    whole = parse(lines())
    whole.sources.add(str(program))
    undisturbed = replace(played(folder, []), records=(whole,))
    disturbances = [Disturbance(6, False, "a save"), Disturbance(12, True, "")]
    starts = [
        played(folder, lines(last=6)),
        played(folder, second, code=-9, kills=True),
        played(folder, third),
    ]
    return RehearsalRecord(undisturbed, disturbances, starts)


def with_best(told: list[str], value: str) -> list[str]:
    """The same, but for a variable of the program."""

    def changed(line: dict[str, Any]) -> dict[str, Any]:
        best = {"best": ["value", value, value]}
        return {**line, "variables": best} if "began" in line else line

    return [json.dumps(changed(json.loads(line))) for line in told]


def test_equal_starts_are_exact(tmp_path: Path) -> None:
    text, code = report(seen(tmp_path, lines(7, 11), lines(7)), 1)

    assert code is ExitCode.COMPLETED
    assert text.splitlines()[-1] == f"exact: {STEPS} steps on 1 rank, stopped and killed 2 times"
    assert "DIFFER" not in text


def test_a_start_that_begins_elsewhere_is_told(tmp_path: Path) -> None:
    text, code = report(seen(tmp_path, lines(1, 11), lines(7)), 1)

    assert code is ExitCode.CRASHED
    assert "stopped after step 6 (a save), it began again with step 1 instead of 7" in text


def test_a_variable_that_training_depends_on_is_a_difference(tmp_path: Path) -> None:
    text, code = report(seen(tmp_path, with_best(lines(7, 11), "inf"), lines(7)), 1)

    assert code is ExitCode.CRASHED
    assert "`best` is inf instead of 7" in text


def test_a_variable_that_is_only_told_is_none(tmp_path: Path) -> None:
    text, code = report(seen(tmp_path, with_best(lines(7, 11), "inf"), lines(7), TELLS), 1)

    assert code is ExitCode.COMPLETED
    assert "only tells people something: `best`" in text


def test_what_differs_before_any_disturbance_is_no_fault_of_a_resume(tmp_path: Path) -> None:
    found = seen(tmp_path, lines(7, 11), lines(7))
    others = {step: [f"x{step}"] for step in range(1, 7)}
    found.starts[0] = played(tmp_path, lines(last=6, samples=others))

    text, code = report(found, 1)

    assert code is ExitCode.CRASHED
    assert "two undisturbed runs differ: the samples differ from step 1" in text


def test_the_last_words_of_a_start_that_fails_are_shown(tmp_path: Path) -> None:
    (tmp_path / "rank-0.out").write_text("loading\nkempner: the names differ: register x\n")
    found = seen(tmp_path, lines(7, 11), lines(7))
    found.starts[2:] = [played(tmp_path, [], code=2)]

    text, code = report(found, 1)

    assert code is ExitCode.CRASHED
    assert "start 3, of a program that was killed in step 12" in text
    assert "ended with code 2: kempner: the names differ: register x" in text


def test_a_program_that_fails_undisturbed_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "rank-0.out").write_text("ZeroDivisionError: division by zero\n")
    found = RehearsalRecord(played(tmp_path, [], code=1))

    text, code = report(found, 1)

    assert code is ExitCode.CRASHED
    assert "the program itself ended with code 1: ZeroDivisionError" in text
