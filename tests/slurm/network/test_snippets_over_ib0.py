"""The pages' snippets on two nodes, whose ranks reach each other over ib0 alone: stopped, resumed.

Of each library one is enough: all snippets are in tests/matrix, on one rank and on two.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drilling import ALL
from harness import PYTHON
from matrix.cells import Program
from matrix.compare import Notes
from matrix.kinds import HUGGING_FACE_MODULES, LIGHTNING_MODULES
from matrix.play import PROGRAMS, Player, notes
from matrix.snippets import TRAIN, Snippet
from records import commit
from submitting import Project

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(600)

BY_LIBRARY = {snippet.integration: snippet for snippet in reversed(TRAIN)}
DRAWN = random.Random(commit().rstrip("+")).choice(sorted(BY_LIBRARY))
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=2
#SBATCH --requeue --open-mode=append --output=logs/%j_snippet.out
exec {PYTHON} -m kempner supervise --launcher srun -- {PYTHON} {PROGRAMS}/snippet.py snippet.txt
"""


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(
            snippet, id=library, marks=pytest.mark.drill if ALL or library != DRAWN else ()
        )
        for library, snippet in BY_LIBRARY.items()
    ],
)
def test_a_snippet_goes_on_after_a_warning(
    snippet: Snippet, project: Project, shared: Path, tmp_path: Path
) -> None:
    """`make check` plays one that is drawn by the commit."""
    (project.folder / "snippet.txt").write_text(snippet.code)
    (project.folder / "snippet.sh").write_text(SCRIPT)

    def happened(event: str) -> list[dict[str, object]]:
        ledgers = (project.folder / "runs").rglob("ledger.jsonl")
        return [e for ledger in ledgers for e in read_lines(ledger) if e["event"] == event]

    project.slow(rate="400kbit")
    job = project.cluster.sbatch("snippet.sh", cwd=project.folder, OMP_NUM_THREADS="1")
    project.wait_until(job, lambda: happened("checkpoint_committed"), "a commit")
    project.warn(job)
    project.wait_until(job, lambda: happened("requeued"), "the requeue")
    project.hurry()
    undisturbed = alone(project.folder / "snippet.txt", shared, tmp_path / "undisturbed")
    project.end(job)
    project.assert_states(job, "REQUEUED", "COMPLETED")
    assert [e["lost_steps"] for e in happened("stopped")] == [0]
    for expected, found in zip(undisturbed, notes(project.folder, 2), strict=True):
        assert found.noted["weights", "end"] == expected.noted["weights", "end"]
        assert len(found.noted["made", "0"]) == 2
        assert sum(found.noted["made", "0"]) == expected.noted["made", "0"][0]


def alone(file: Path, shared: Path, folder: Path) -> list[Notes]:
    """What its two ranks note on this machine when nothing happens."""
    player = Player(shared, (*HUGGING_FACE_MODULES, *LIGHTNING_MODULES))
    start = player.start(Program("snippet.py", str(file), "", worlds=False), 2, folder)
    assert set(start.codes) == {0}, start.printed
    return notes(folder, 2)
