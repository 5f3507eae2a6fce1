"""Trains by Lightning's Trainer, under kempner."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from trouble import note, strike

from kempner.integrations.lightning import KempnerEnvironment, Survive

SAMPLES = 96


class Points(Dataset[tuple[int, Tensor]]):
    """Numbered points."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.tensor([index / SAMPLES])


class Curve(LightningModule):
    """Learns a sine; notes what it trains on, before trouble comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        indices, x = batch
        loss = nn.functional.mse_loss(self.layers(x), torch.sin(6 * x))
        step = self.global_step + 1
        note(step, indices.tolist(), loss.item())
        strike(step)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("held_out", self.layers(batch[1]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    seed_everything(1)
    points, workers = Points(), int(os.environ["WORKERS"])
    options: dict[str, Any] = {
        "max_epochs": 3,
        "accumulate_grad_batches": int(os.environ["ACCUMULATION"]),
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "strategy": "ddp" if "WORLD_SIZE" in os.environ else "auto",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "callbacks": [Survive(save_every=5)],
        "plugins": [KempnerEnvironment()],
    }
    loader = DataLoader(points, batch_size=2, shuffle=True, num_workers=workers)
    module = Curve()
    held_out = DataLoader(Points(), batch_size=48)
    Trainer(**options).fit(module, loader, held_out)
    torch.save(module.state_dict(), f"final-{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main()
