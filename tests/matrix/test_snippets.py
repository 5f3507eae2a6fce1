"""Every snippet of the pages that trains, as it stands there: stopped and resumed once."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kempner.run.process.exit_codes import ExitCode
from matrix.cells import Cell, Program
from matrix.kinds import HUGGING_FACE_MODULES, LIGHTNING_MODULES
from matrix.play import Player, notes
from matrix.snippets import CASES, ELSEWHERE, TRAIN, Case, draw, snippets


def test_what_is_run_elsewhere_is_there() -> None:
    assert ELSEWHERE.keys() <= {snippet.name for snippet in snippets()}
    integrations = {snippet.integration for snippet in TRAIN}
    assert integrations == {"survive", "surviving", "lightning", "Fabric", "accelerator"}


@given(st.text(max_size=8))
def test_each_is_drawn_on_some_number_of_ranks(commit: str) -> None:
    assert sorted(case.snippet.name for case in draw(CASES, commit)) == sorted(
        snippet.name for snippet in TRAIN
    )


def test_a_snippet_is_stopped_and_resumed(case: Case, shared: Path, tmp_path: Path) -> None:
    file = tmp_path / "snippet.txt"
    file.write_text(case.snippet.code)
    program = Program("snippet.py", str(file), "", worlds=False)
    player = Player(shared, (*HUGGING_FACE_MODULES, *LIGHTNING_MODULES))
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    whole = player.start(program, case.ranks, undisturbed)
    assert set(whole.codes) == {0}, whole.printed
    stop = Cell(program, case.ranks, "stop", "", "made 60")
    first = player.start(program, case.ranks, disturbed, stop)
    assert set(first.codes) == {int(ExitCode.STOPPED)}, first.printed
    second = player.start(program, case.ranks, disturbed)
    assert set(second.codes) == {0}, second.printed
    pairs = zip(notes(undisturbed, case.ranks), notes(disturbed, case.ranks), strict=True)
    for expected, found in pairs:
        assert found.noted["weights", "end"] == expected.noted["weights", "end"]
        (all_steps,) = expected.noted["made", "0"]
        assert all_steps == sum(found.noted["made", "0"])
