"""What all recipes train, how they note it, and the one interruption that a scenario has.

96 numbered samples in three epochs; a global batch of 8 in two micro batches of each of two ranks,
so that an epoch has 12 steps; an evaluation every 6 steps, and a checkpoint every 5.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from shape import BATCH, GLOBAL_BATCH, SAMPLES
from torch import Tensor, nn
from torch.utils.data import Dataset

PLACES = ("REPLICA_GROUP_ID", "RANK", "SLURM_PROCID")
RANK = int(next((os.environ[name] for name in PLACES if name in os.environ), "0"))
WORLD = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))
ACCUMULATION = GLOBAL_BATCH // (BATCH * WORLD)
FOLDER = Path(os.environ.get("PEERS_FOLDER", "."))
PLAN: dict[str, Any] = json.loads((FOLDER / "plan.json").read_text())
"""What the driver has written for this start: a variable would make it another program."""
WORKERS: int = PLAN["workers"]
UNDER_KEMPNER = "PEERS_UNDER_KEMPNER" in os.environ

MADE: Counter[int] = Counter()
"""How many micro batches of each step this process has begun."""
ASKED, DONE = FOLDER / "interrupt-now", FOLDER / f"interrupted-{PLAN['start']}"
OVER = ASKED.exists()
"""Whether this process has come after the interruption."""


class Points(Dataset[tuple[int, Tensor]]):
    """Numbered points of a curve."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.tensor([index / SAMPLES])


def curve() -> nn.Module:
    """Dropout, so that a generator that does not come back shows in the losses."""
    return nn.Sequential(nn.Linear(1, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), torch.sin(6 * x))


def note(step: int, samples: list[int], loss: float, rank: int = RANK) -> None:
    """This rank trains on these samples in `step`; the interruption of `step` follows."""
    line = {"pid": os.getpid(), "time": monotonic(), "step": step}
    with open(FOLDER / f"notes-{rank}.jsonl", "a") as notes:
        notes.write(json.dumps({**line, "samples": samples, "loss": loss.hex()}) + "\n")
    MADE[step] += 1
    interrupt(("within", "end of")[MADE[step] == ACCUMULATION], step, rank)


def evaluating(step: int) -> None:
    """This rank evaluates after `step`."""
    interrupt("evaluation after", step, RANK)


def interrupt(place: str, step: int, rank: int) -> None:
    """If the scenario asks for it here, have the driver interrupt this job, once.

    All ranks wait here until that is done, so that it happens in this step and no other; in a hang
    the one alone, for ever. The later steps of this process are as slow as real ones.
    """
    mine = rank == PLAN["rank"]
    if PLAN["interrupt"] == f"{place} {step}" and not OVER and (mine or PLAN["together"]):
        if mine and not ASKED.exists():
            ASKED.write_text(str(os.getpid()))
        while not DONE.exists():
            sleep(0.01)
        sleep(PLAN["notice"])
    elif DONE.exists() and not OVER:
        sleep(0.1)


def finish(model: nn.Module, rank: int = RANK) -> None:
    """Training is complete."""
    torch.save(model.state_dict(), FOLDER / f"final-{rank}.pt")


(FOLDER / f"rank-{RANK}.pid").write_text(str(os.getpid()))
