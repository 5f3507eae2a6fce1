"""Trains by Lightning's Trainer: with_lightning.py Lightning VARIANT"""

from __future__ import annotations

import sys
from typing import Any

import record
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset

from kempner.integrations.lightning import KempnerEnvironment, Survive

EPOCH, BATCH = 5, 4

Samples = tuple[Tensor, Tensor, Tensor]

VARIANTS: dict[str, dict[str, Any]] = {
    "steps": {"max_steps": 14},
    "epochs": {"max_epochs": 3},
    "accumulate": {"accumulate_grad_batches": 2, "max_epochs": 4},
    "ragged": {"accumulate_grad_batches": 2, "max_epochs": 5},
    "interval": {"max_steps": 14, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "half": {"max_epochs": 3, "limit_train_batches": 4, "val_check_interval": 0.5},
    "every_other": {"max_epochs": 4, "check_val_every_n_epoch": 2},
    "plateau": {"max_epochs": 3},
    "by_epoch": {"max_epochs": 3},
    "early": {"max_epochs": 9},
    "best": {"max_epochs": 3},
    "workers": {"max_steps": 14},
    "dropout": {"max_steps": 14},
    "clip": {"max_steps": 14, "gradient_clip_val": 0.1},
}


class Points(Dataset[Samples]):
    """Numbered points and a curve through them."""

    def __init__(self, size: int = EPOCH * BATCH) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Samples:
        x = torch.sin(torch.arange(1, 5) * (index + 1.0))
        return torch.tensor(index), x, x.sum(0, keepdim=True).tanh()


class Curve(LightningModule):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        middle = nn.Dropout(0.3) if variant == "dropout" else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), middle, nn.Linear(8, 1))
        self.found: list[Tensor] = []

    def training_step(self, batch: Samples, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[1]), batch[2])
        rates = [group["lr"] for group in self.optimizers().param_groups]  # type: ignore[union-attr]
        record.step(self.global_step + 1, loss, batch[0], rates)
        return loss

    def validation_step(self, batch: Samples, batch_idx: int) -> None:
        record.evaluating(self.global_step)
        loss = nn.functional.mse_loss(self.layers(batch[1]), batch[2])
        self.found.append(loss)
        self.log("held_out", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        mean: Any = self.all_gather(torch.stack(self.found).mean())  # each rank has its share
        record.evaluation(self.global_step, mean.mean())
        self.found.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        if self.variant == "plateau":
            plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "held_out"},
            }
        if self.variant == "by_epoch":
            return [optimizer], [StepLR(optimizer, 1, 0.5)]
        schedule = CosineAnnealingLR(optimizer, T_max=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(variant: str) -> None:
    seed_everything(3)
    callbacks: list[Any] = [Survive(save_every=3 if variant in ("accumulate", "ragged") else 4)]
    best = ModelCheckpoint("saved", monitor="held_out", save_top_k=1)
    if variant == "early":
        callbacks.append(EarlyStopping("held_out", min_delta=10.0, patience=1))
    if variant == "best":
        callbacks.append(best)
    trainer = Trainer(
        accelerator="cpu",
        devices=record.WORLD,
        strategy="ddp" if record.WORLD > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=variant == "best",
        num_sanity_val_steps=0,
        plugins=[KempnerEnvironment()],
        callbacks=callbacks,
        **VARIANTS[variant],
    )
    module = Curve(variant)
    size = BATCH * (EPOCH * 2 if variant == "accumulate" else EPOCH)
    workers = 2 if variant == "workers" else 0
    loader = DataLoader(Points(size), BATCH // record.WORLD, shuffle=True, num_workers=workers)
    trainer.fit(module, loader, DataLoader(Points(8), 8 // record.WORLD))
    found = best.best_model_path.rpartition("/")[2] if variant == "best" else None
    record.end(trainer.global_step, module, best=found)


if __name__ == "__main__":
    main(sys.argv[2])
