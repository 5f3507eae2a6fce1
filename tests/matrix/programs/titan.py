"""Trains by torchtitan's own trainer and its checkpoints: titan.py torchtitan VARIANT"""

from __future__ import annotations

import sys
from pathlib import Path

import record

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from titan_on_cpu import WORLD, Task, train

EPOCH, BATCH = 5, 2
ACCUMULATION = 2 if sys.argv[2] == "accumulate" else 1

if __name__ == "__main__":
    task = Task(
        samples=EPOCH * BATCH * ACCUMULATION * WORLD,
        length=6,
        batch=BATCH,
        steps=14,
        accumulation=ACCUMULATION,
        save_every=4,
    )
    train(task, record.step, record.end)
