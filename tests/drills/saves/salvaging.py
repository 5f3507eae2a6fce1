"""A process that holds the steps of two dead ranks, and makes a checkpoint of the newest one.

    python salvaging.py RUN_DIR        (begins once it reads a line, and says so when it is done)

The run has committed step 1, by which the newest, step 2, is not in its way.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kempner.checkpoint.format.manifest import Identity, TrainState
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.slots.memory import (
    Branch,
    Notes,
    SlotContents,
    SlotHolder,
    SlotMemory,
    open_slots,
)
from kempner.checkpoint.slots.pour import offers, pour
from kempner.config.sections import Config
from kempner.run.process.signals import SignalInbox
from kempner.run.record.attempts import Attempt, begin_attempt, read_current
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor import recovery

WORLD, IMAGE = 2, bytes(range(256)) * 4096  # a MiB each: two blocks of sums would be more


def hold(holder: SlotHolder, attempt: Attempt, step: int) -> None:
    """Have both ranks of an attempt hold a step."""
    for rank in range(WORLD):
        environ: dict[str, str] = {}
        holder.lend(rank, environ)
        lent = open_slots(environ)
        assert lent is not None
        memory = SlotMemory.grown(lent.slots[0], len(IMAGE))
        memory.image[:] = IMAGE
        identity = asdict(Identity(WORLD, {}, 0, None, {})) if rank == 0 else {}
        state, branch = TrainState(step), Branch(attempt.nonce)
        memory.publish(SlotContents(state, branch, rank, WORLD, 7, 0, len(IMAGE), identity))
        Notes(7, {"index.json": b"{}"}).write(lent.notes)


def context_of(run: RunDirectory, holder: SlotHolder) -> Any:
    """As much of a supervisor's as a salvage asks for."""
    return SimpleNamespace(
        run=run,
        config=Config(),
        history=RunHistory(),
        ledger=Ledger(run.ledger),
        signals=SignalInbox(),
        launcher=SimpleNamespace(
            offers=lambda nonce: offers(holder, nonce),
            pour=lambda nonce, step, folder: pour(holder, nonce, step, folder),
        ),
    )


def salvage_step(run: RunDirectory, attempt: Attempt, step: int) -> None:
    """As after the death of both ranks in the step after that."""
    holder = SlotHolder()
    hold(holder, attempt, step)
    recovery._salvage(cast(Any, context_of(run, holder)), attempt)


def main() -> None:
    run = RunDirectory(Path(sys.argv[1]))
    if CheckpointFolder(run.checkpoints).latest() is None:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        salvage_step(run, begin_attempt(run), 1)
    attempt = read_current(run.attempts)
    assert attempt is not None
    print("ready", flush=True)
    sys.stdin.readline()
    salvage_step(run, attempt, 2)


if __name__ == "__main__":
    main()
