"""transformers' Trainer under kempner does what it does alone, whatever stops or kills it.

Its logs, evaluations, early stops, best checkpoint, samples, learning rates, steps and weights are
compared to the bit; so are those of a completed run that is started again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import drills, launch

VARIANTS = [
    "intervals",
    "epochs",
    "best",
    "early",
    "early_epochs",
    "plateau",
    "max_steps",
    "unsaved",
    "by_length",
    "own_sampler",
    "augmented",
    "workers",
    "stream",
]
"""What `trainer_cells.py` can play."""

CELLS = Path(__file__).with_name("own") / "trainer_cells.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variants", [[], *drills(*([name] for name in VARIANTS))], ids=str)
def test_the_trainer_is_as_it_is_alone(variants: list[str], tmp_path: Path) -> None:
    launch(CELLS, 1, tmp_path, *variants, deadline=100)
