"""The plain loop by submitit, on its local executor: its requeue by a signal, without a Slurm.

The job is a checkpointable callable, as its page has it; rank 0 saves nothing in the handler, since
the loop's own snapshots are there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import submitit

HERE = Path(__file__).parent


class Training:
    """Each task is a rank."""

    def __call__(self) -> None:
        place = submitit.JobEnvironment()
        rank, world = str(place.global_rank), str(place.num_tasks)
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
        sys.path.insert(0, str(HERE))
        import plain_loop

        plain_loop.main(plain_loop.Keeper())

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self)


def main() -> None:
    executor = submitit.AutoExecutor(folder="submitit", cluster="local")
    tasks = int(sys.argv[1])
    executor.update_parameters(tasks_per_node=tasks, timeout_min=5)
    job = executor.submit(Training())
    job.wait()
    print(job.state, file=sys.stderr)
    subprocess.run(["sh", "-c", "tail -n 2 submitit/*.err >&2"], check=False)
    sys.exit(0 if job.exception() is None else 1)


if __name__ == "__main__":
    main()
