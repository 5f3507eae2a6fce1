"""`kempner rehearse` names what is planted, and calls exact what is.

`make long` takes all 81 programs of tests/rehearsed, `make check` some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from drilling import ALL, SEED, note
from rehearsed import HERE, MISTAKES, SOUND, rehearse

from kempner.rehearse.rehearsal import Stage

DRAWN = 3


def drawn(programs: Sequence[Path]) -> list[Path]:
    return list(programs) if ALL else sorted(Random(SEED).sample(programs, DRAWN))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage().open() as opened:
        yield opened


@pytest.mark.parametrize(
    "program", drawn(MISTAKES) + drawn(SOUND), ids=lambda path: str(path.relative_to(HERE))
)
def test_a_mistake_is_named_and_what_has_none_is_exact(
    program: Path, tmp_path: Path, stage: Stage
) -> None:
    outcome = rehearse(program, tmp_path, stage)

    note("rehearsal", program=str(program.relative_to(HERE)), passed=outcome.passed)
    assert outcome.passed, outcome.text


def test_there_are_forty_of_each() -> None:
    assert (len(MISTAKES), len(SOUND)) == (40, 41)
