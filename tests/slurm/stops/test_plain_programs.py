"""A program that knows nothing of kempner, as a job of two nodes: it is requeued after each stop,
whatever its ranks leave with, and one of them that leaves alone is missed at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import PYTHON
from submitting import Project

from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.policy.outcome import STARTED
from kempner.supervisor.policy.restart import MAX_REQUEUES_WITHOUT_PROGRESS

pytestmark = pytest.mark.timeout(400)

SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=2 --time=5
#SBATCH --requeue --open-mode=append --output=logs/%j_plain.out
exec {PYTHON} -m kempner supervise --launcher srun --run.name=plain \\
    --supervise.crash_grace=2 -- bash plain.sh
"""

PLAIN = """
trap 'echo stopped >> told-$RANK; exit $((7 * RANK))' TERM
echo from >> told-$RANK
while [ ! -e finish ]; do
    [ $RANK = 1 ] && [ -e leave ] && rm leave && exit 3
    sleep 0.1
done
echo done >> told-$RANK
"""


@pytest.mark.every_slurm
def test_a_plain_program_comes_back_after_every_stop_and_when_one_rank_leaves(
    project: Project,
) -> None:
    (project.folder / "plain.sh").write_text(PLAIN)
    (project.folder / "submitted.sh").write_text(SCRIPT)
    ledger = RunDirectory(project.folder / "runs" / "plain").ledger
    stops = MAX_REQUEUES_WITHOUT_PROGRESS + 1

    def events(name: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(ledger) if event["event"] == name]

    def told(rank: int) -> list[str]:
        file = project.folder / f"told-{rank}"
        return file.read_text().split() if file.exists() else []

    def at_work(life: int) -> bool:
        """Whether both ranks run for the `life`th time, and for long enough to have made steps."""
        if any(told(rank).count("from") != life for rank in (0, 1)):
            return False
        return time.time() - events("attempt_started")[-1]["time"] > STARTED + 1

    job = project.cluster.sbatch("submitted.sh", cwd=project.folder, OMP_NUM_THREADS="1")
    for stop in range(1, stops + 1):
        project.wait_until(job, lambda s=stop: at_work(s), f"life {stop}")
        project.warn(job)
        project.wait_until(job, lambda s=stop: len(events("requeued")) == s, f"requeue {stop}")
    assert [e["exits"] for e in events("attempt_ended")] == [{"0": 0, "1": 7}] * stops
    # Slurm has three seconds to say why a signal came.
    assert {e["reason"] for e in events("stop_requested")} <= {"time_limit", "signal"}
    assert len(events("program_advanced")) == stops

    project.wait_until(job, lambda: at_work(stops + 1), "the last life")
    (project.folder / "leave").touch()
    project.wait_until(job, lambda: events("restarting"), "that rank 1 is missed", 30)
    ended = events("attempt_ended")[-1]
    assert (ended["culprit"], ended["exits"]["1"]) == (1, 3)
    project.wait_until(job, lambda: told(1).count("from") == stops + 2, "another start", 60)
    (project.folder / "finish").touch()
    project.end(job)
    for rank in (0, 1):
        assert told(rank).count("stopped") == stops
        assert told(rank)[-1] == "done"
    project.assert_states(job, *["REQUEUED"] * stops, "COMPLETED")
