"""Trains by torchtitan's own trainer, whose checkpoints it resumes from, under kempner or alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from trouble import RANK, note, strike

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from titan_on_cpu import Task, train


def noted(step: int, loss: torch.Tensor, samples: list[int], _: list[float]) -> None:
    note(step, samples, loss.item())
    strike(step)


def save(_: int, model: Any) -> None:
    torch.save(model.state_dict(), f"final-{RANK}.pt")


if __name__ == "__main__":
    accumulation = int(os.environ["ACCUMULATION"])
    train(Task(96, 12, 2, 36, accumulation, save_every=5), noted, save)
