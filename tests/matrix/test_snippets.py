"""Every snippet of the pages that trains, as it stands there: stopped and resumed once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT

from kempner.run.process.exit_codes import ExitCode
from matrix.cells import Cell, Program
from matrix.kinds import HUGGING_FACE_MODULES, LIGHTNING_MODULES
from matrix.play import Player, notes

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

ELSEWHERE = {
    "docs/architecture.md: while train_state.step < last_step and not agreed.stop:": "shortened",
    "docs/checkpoints.md: from transformers import AutoModelForCausalLM, AutoTokenizer": "does not "
    "train: tests/unit/checkpoint/convert",
    "docs/data.md: from kempner import ResumableBatchSampler, ResumableDataLoader": "saves by "
    "itself: tests/unit/data",
    "docs/submit.md: import kempner": "tests/distributed/jobs/test_submit.py",
    'docs/own_loop.md: """The same loop, and it survives: kempner supervise --nproc 2 -- python '
    'surviving.py"""': "parts of docs/examples/surviving.py: tests/distributed/programs",
}
"""Snippets that are not run here, by their page and first line, and why, or where instead."""


def snippets() -> Iterator[tuple[str, str]]:
    """Each with its name. Of a diff, what stands there after the change."""
    for page in PAGES:
        for kind, text in _BLOCK.findall((ROOT / page).read_text()):
            lines = text.splitlines()
            if kind == "diff":
                lines = [line[1:] for line in lines if not line.startswith("-")]
            yield f"{page}: {lines[0]}", "\n".join(lines)


RUN = [pytest.param(code, id=name) for name, code in snippets() if name not in ELSEWHERE]


def test_what_is_run_elsewhere_is_there() -> None:
    assert ELSEWHERE.keys() <= {name for name, _ in snippets()}
    assert len(RUN) >= 4


@pytest.mark.parametrize("code", RUN)
def test_a_snippet_is_stopped_and_resumed(code: str, shared: Path, tmp_path: Path) -> None:
    file = tmp_path / "snippet.txt"
    file.write_text(code)
    program = Program("snippet.py", str(file), "", worlds=False)
    player = Player(shared, (*HUGGING_FACE_MODULES, *LIGHTNING_MODULES))
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    whole = player.start(program, 1, undisturbed)
    assert whole.codes == (0,), whole.printed
    stop = Cell(program, 1, "stop", "", "made 60")
    first = player.start(program, 1, disturbed, stop)
    assert first.codes == (int(ExitCode.STOPPED),), first.printed
    second = player.start(program, 1, disturbed)
    assert second.codes == (0,), second.printed
    (expected,), (found,) = notes(undisturbed, 1), notes(disturbed, 1)
    assert found.noted["weights", "end"] == expected.noted["weights", "end"]
    (all_steps,) = expected.noted["made", "0"]
    assert all_steps == sum(found.noted["made", "0"])
