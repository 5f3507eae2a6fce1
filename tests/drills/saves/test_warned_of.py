"""What the documentation of the checkpoints warns of, with several ranks.

The rest of it needs one process or none: a name that an abandoned branch has left, a rename whose
answer is lost, a folder that is seen late, space that cannot be reserved (tests/unit).
"""

from __future__ import annotations

from pathlib import Path

from drilling import note
from harness import launch


def test_a_save_holds_the_state_of_its_moment_whatever_happens_to_the_tensors(
    tmp_path: Path,
) -> None:
    launch(Path(__file__).with_name("warned_of.py"), 2, tmp_path / "run")
    note("unsharded parameters, swapped weights, other tensors", ranks=2)
