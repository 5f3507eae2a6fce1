"""A loop of the user's own as a Slurm job: its ranks find each other, stop, and come back."""

from __future__ import annotations

import re
import shutil

import pytest
from harness import PYTHON, ROOT
from submitting import Project

from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(300)

SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=2
#SBATCH --requeue --open-mode=append --output=logs/%j_own.out
exec {PYTHON} -m kempner supervise --launcher srun -- {PYTHON} surviving.py
"""


def talks_to(project: Project, node: str) -> set[str]:
    """Where the processes of a node that belong to the run are connected to, outside of it."""
    told = project.cluster.run(node, "ss", "-tnpH", "state", "established").stdout
    peers = re.findall(r" (\S+):\d+ +users:\(\(\"(?!slurm|srun)", told)
    return {peer.strip("[]").removeprefix("::ffff:") for peer in peers}


@pytest.mark.every_slurm
def test_the_example_over_two_nodes_goes_on_after_a_warning(project: Project) -> None:
    shutil.copy(ROOT / "docs" / "examples" / "surviving.py", project.folder)
    (project.folder / "own.sh").write_text(SCRIPT)
    ledger = RunDirectory(project.folder / "runs" / "surviving").ledger

    def steps(event: str) -> list[int]:
        return [e["step"] for e in read_lines(ledger) if e["event"] == event]

    job = project.cluster.sbatch("own.sh", cwd=project.folder, OMP_NUM_THREADS="1")
    project.wait_until(job, lambda: steps("checkpoint_committed"), "a commit")
    assert talks_to(project, "node2") == {project.cluster.address("node1", "ib0")}
    project.slow(rate="400kbit")
    project.warn(job)
    project.wait_until(job, lambda: steps("requeued"), "the requeue")
    project.hurry()
    project.end(job)
    (stopped,) = steps("stopped")
    assert steps("requeued") == steps("resumed") == [stopped]
    assert steps("completed") == [200]
    printed = [int(n) for n in re.findall(r"^step (\d+) loss", project.log(job), re.M)]
    assert printed == list(range(1, 201))
    assert (project.folder / "curve.pt").exists()
    project.assert_states(job, "REQUEUED", "COMPLETED")
