"""torchtitan's own trainer, with its own checkpoints; it has no answer to a signal.

What torchtitan asks a GPU, a CPU answers, as in the tests of its integration.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import shape
import task
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[3] / "tests"))
from titan_on_cpu import Task, train


def noted(step: int, loss: Tensor, samples: list[int], _: list[float]) -> None:
    task.note(step, samples, loss.item())


def end(_: int, model: Any) -> None:
    task.finish(model)


if __name__ == "__main__":
    length, many = 12, task.ACCUMULATION
    sizes = Task(shape.SAMPLES, length, shape.BATCH, shape.STEPS, many, shape.SAVE_EVERY)
    train(sizes, noted, end)
