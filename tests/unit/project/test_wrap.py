"""`kempner wrap`: thirty batch scripts as people write them, and what becomes of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.project.wrap.decide import Refused, Wrapped, diff, wrap

SCRIPTS = Path(__file__).parent / "batch_scripts"
PYTHON = "/env/bin/python"


def changed(found: Wrapped | Refused, before: bytes) -> str:
    """The lines that go and come, or the sentence of a refusal."""
    if isinstance(found, Refused):
        return f"refused: {found.sentence}\n"
    lines = diff(before, found, "job").splitlines(keepends=True)[2:]
    return "".join(line for line in lines if line[0] in "+-")


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda file: file.stem)
def test_a_script_becomes_what_was_written_down_before(file: Path) -> None:
    before = file.read_bytes()
    found = changed(wrap(before, PYTHON, file.name), before)
    assert found == file.with_suffix(".expected").read_text()
