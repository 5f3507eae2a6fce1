"""ZeRO of DeepSpeed as a Slurm job on two nodes: stopped, requeued, killed, and nothing differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness import PYTHON, ROOT
from submitting import Project

from kempner.run.record.ledger import read_lines

OWN = ROOT / "tests" / "distributed" / "integrations" / "own"

SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=2
#SBATCH --requeue --open-mode=append --output=logs/%j_zero.out
export PYTHONPATH="{OWN}:$PYTHONPATH"
exec {PYTHON} -m kempner supervise --launcher srun --run.name=zero \\
    '--program.progress_pattern=step ([0-9]+) ' -- {PYTHON} {OWN / "own_deepspeed.py"}
"""


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_a_requeued_job_of_zero_goes_on_and_a_killed_rank_costs_what_was_not_saved(
    project: Project,
) -> None:
    """`make check` has other programs that save by themselves (`test_wrapped_programs.py`)."""
    pytest.importorskip("deepspeed")
    folder = project.folder
    (folder / "zero.sh").write_text(SCRIPT)
    losses: list[list[dict[int, str]]] = []
    for trouble, states in (("", ()), ("stop@7 kill@26.1", ("REQUEUED",))):
        for left in ("zero", "runs/zero"):
            shutil.rmtree(folder / left, ignore_errors=True)
        for rank in range(2):
            (folder / f"notes-{rank}.jsonl").unlink(missing_ok=True)
        job = project.cluster.sbatch(
            "zero.sh", cwd=folder, OMP_NUM_THREADS="1", TROUBLE=trouble, ZERO="2"
        )
        project.end(job, deadline=400)
        project.assert_states(job, *states, "COMPLETED")
        losses.append([noted(folder / f"notes-{rank}.jsonl") for rank in range(2)])
    undisturbed, disturbed = losses
    assert disturbed == undisturbed
    assert [sorted(each) for each in undisturbed] == [list(range(1, 41))] * 2


def noted(path: Path) -> dict[int, str]:
    """Of each step the loss of the last time that it was made."""
    return {line["step"]: line["loss"] for line in read_lines(path)}
