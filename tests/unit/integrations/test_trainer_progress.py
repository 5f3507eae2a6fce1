"""What stands beside a Trainer's checkpoint is each rank's own, and of other ranks their mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kempner.integrations.transformers_trainer.state import TrainerPlace, TrainerProgress


@pytest.mark.parametrize(
    ("rank", "ranks", "loss"), [(0, 2, 1.0), (1, 2, 3.0), (0, 1, 2.0), (2, 3, 2.0)]
)
def test_the_losses_since_the_last_log_come_back(
    tmp_path: Path, rank: int, ranks: int, loss: float
) -> None:
    assert TrainerProgress.load(tmp_path, rank, ranks) is None  # of before there was any
    for before, its in enumerate((1.0, 3.0)):
        place = TrainerPlace(epoch=0, samples=8, per_step=4, ranks=2)
        TrainerProgress(place, loss=torch.tensor(its), logged=3).save(tmp_path, before)
    found = TrainerProgress.load(tmp_path, rank, ranks)
    assert found is not None
    assert (found.place, found.loss, found.logged) == (place, loss, 3)
