"""A rank that leaves step 7 in memory, as one that trains does. Then its job's end is near: Slurm
warns the batch process, and the rank stops when it is asked to.

    leaves_step.py FOLDER SECONDS"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from fake_slurm import job_ends

from kempner.checkpoint.format.manifest import Identity, TrainState
from kempner.checkpoint.slots.memory import Branch, Notes, SlotContents, SlotMemory, open_slots
from kempner.run.control.launch_env import Launch

IMAGE = bytes(range(256)) * 256


def main() -> None:
    launch, lent = Launch.from_environment(os.environ), open_slots(os.environ)
    assert launch is not None
    assert lent is not None
    memory = SlotMemory.grown(lent.slots[0], len(IMAGE))
    memory.image[:] = IMAGE
    identity, branch = asdict(Identity(1, {}, 0, None, {})), Branch(launch.attempt.nonce)
    memory.publish(SlotContents(TrainState(7), branch, 0, 1, 7, 0, len(IMAGE), identity))
    Notes(7, {"index.json": b"{}"}).write(lent.notes)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    job_ends(Path(sys.argv[1]), float(sys.argv[2]))
    os.kill(int(os.environ["SLURM_TASK_PID"]), signal.SIGTERM)
    signal.sigwait({signal.SIGTERM})
    os._exit(75)


if __name__ == "__main__":
    main()
