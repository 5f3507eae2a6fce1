"""What the programs of these tests share: notes of what they trained on, and trouble on demand.

TROUBLE is a list such as `stop@13 kill@40.1`: in step 13 rank 0 and the workers of its loader get
SIGTERM, as all processes of a Slurm step do; in step 40 rank 1 is killed. `warn@13` is a SIGTERM to
who has started rank 0, as Slurm's warning is. Each happens once in the life of a run, however often
the step is made.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil

RANK = int(os.environ.get("RANK", "0"))


def note(step: int, samples: list[int], loss: float) -> None:
    """In `step` this rank trains on these samples, and their loss is that."""
    with open(f"notes-{RANK}.jsonl", "a") as notes:
        line = {"step": step, "samples": samples, "loss": float(loss).hex()}
        notes.write(json.dumps(line) + "\n")


def strike(step: int) -> None:
    """Do what is to happen in `step`."""
    for trouble in os.environ.get("TROUBLE", "").split():
        kind, _, where = trouble.partition("@")
        at, _, rank = where.partition(".")
        done = Path(f"done-{trouble}")
        if (int(at), int(rank or 0)) == (step, RANK) and not done.exists():
            done.touch()
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "warn":
                os.kill(os.getppid(), signal.SIGTERM)
                return
            mine = [*psutil.Process().children(recursive=True), psutil.Process()]
            # Not from here: a worker's own rank may end it.
            subprocess.run(["kill", "-TERM", *(str(process.pid) for process in mine)], check=True)
