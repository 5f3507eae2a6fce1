"""Trains by a loop with Accelerate, under kempner."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from trouble import note, strike

from kempner import survive

SAMPLES, BATCH, EPOCHS = 96, 2, 3
ACCUMULATION, WORKERS = int(os.environ["ACCUMULATION"]), int(os.environ["WORKERS"])


class Points(Dataset[tuple[int, Tensor]]):
    """Numbered points."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.tensor([index / SAMPLES])


def train_on(model: nn.Module, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
    """The loss of a batch, noted before trouble comes."""
    indices, x = batch
    loss = nn.functional.mse_loss(model(x), torch.sin(6 * x))
    note(step, indices.tolist(), loss.item())
    strike(step)
    return loss


def surviving(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    """All epochs, in steps that are kempner's."""
    loader = accelerator.prepare(DataLoader(Points(), BATCH, shuffle=True, num_workers=WORKERS))
    todo = EPOCHS * SAMPLES // (BATCH * accelerator.num_processes * ACCUMULATION)
    steps = survive(
        model, optimizer, data=loader, accumulate=ACCUMULATION, steps=todo, save_every=5
    )
    for step, batches in steps:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(train_on(model, batch, step))
                optimizer.step()
                optimizer.zero_grad()


def main() -> None:
    set_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    layers = nn.Sequential(nn.Linear(1, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
    adam = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(layers, adam)
    surviving(accelerator, model, optimizer)
    state = accelerator.unwrap_model(model).state_dict()
    torch.save(state, f"final-{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main()
