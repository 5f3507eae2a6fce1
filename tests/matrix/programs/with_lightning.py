"""Trains by Lightning's Trainer: with_lightning.py Lightning VARIANT"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from datasets import Dataset as Rows
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

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
    "logged": {"max_epochs": 3},
    "metric": {"max_epochs": 3},
    "weighted": {"max_steps": 14},
    "augmented": {"max_steps": 14},
    "stateful": {"max_steps": 14},
    "stream": {"max_steps": 14},
    "manual": {"max_steps": 28},
    "uneven": {"max_epochs": 3},
    "defaults": {"max_epochs": 3, "enable_progress_bar": True},
}

WORKERS = ("workers", "augmented", "stateful")


class Points(Dataset[Samples]):
    """Numbered points and a curve through them."""

    def __init__(self, size: int = EPOCH * BATCH, noisy: bool = False) -> None:
        self.size, self.noisy = size, noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Samples:
        x = torch.sin(torch.arange(1, 5) * (index + 1.0))
        if self.noisy:
            x = x + torch.rand(4) + np.random.rand() + random.random()
        return torch.tensor(index), x, x.sum(0, keepdim=True).tanh()


class Curve(LightningModule):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        middle = nn.Dropout(0.3) if variant == "dropout" else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), middle, nn.Linear(8, 1))
        self.found: list[Tensor] = []
        self.mean = MeanMetric()
        self.automatic_optimization = variant != "manual"

    @property
    def done(self) -> int:
        """Steps that are done; Lightning counts those of both optimizers."""
        return self.global_step // 2 if self.variant == "manual" else self.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch["sample"] if self.variant == "stream" else batch
        loss = nn.functional.mse_loss(self.layers(batch[1]), batch[2])
        optimizers: Any = self.optimizers()
        if self.variant == "manual":
            record.step(self.done + 1, loss, batch[0], [])
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss
        rates = [group["lr"] for group in optimizers.param_groups]
        record.step(self.global_step + 1, loss, batch[0], rates)
        if self.variant == "metric":
            self.mean(loss.detach())
            self.log("train", self.mean, on_step=True, on_epoch=True)
        else:
            self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.variant in ("logged", "metric"):
            mean = float(self.trainer.callback_metrics["train_epoch"])
            record.drawn(self.global_step, "mean", mean)

    def validation_step(self, batch: Samples, batch_idx: int) -> None:
        record.evaluating(self.done)
        loss = nn.functional.mse_loss(self.layers(batch[1]), batch[2])
        self.found.append(loss)
        self.log("held_out", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        mean: Any = self.all_gather(torch.stack(self.found).mean())  # each rank has its share
        record.evaluation(self.done, mean.mean())
        self.found.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        if self.variant == "manual":
            last = torch.optim.SGD(self.layers[3].parameters(), lr=1e-2)
            return [torch.optim.AdamW(self.layers[0].parameters(), lr=1e-2, eps=1e-3), last]
        if self.variant in ("plateau", "logged", "metric"):
            plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
            monitor = "held_out" if self.variant == "plateau" else "train_epoch"
            schedule = {"scheduler": plateau, "monitor": monitor}
            return {"optimizer": optimizer, "lr_scheduler": schedule}
        if self.variant == "by_epoch":
            return [optimizer], [StepLR(optimizer, 1, 0.5)]
        schedule = CosineAnnealingLR(optimizer, T_max=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader_of(variant: str) -> Any:
    """The training data."""
    size = BATCH * (EPOCH * 2 if variant == "accumulate" else EPOCH)
    data = Points(size - 3 if variant == "uneven" else size, variant == "augmented")
    options: dict[str, Any] = {"batch_size": BATCH // record.WORLD, "shuffle": True}
    options["num_workers"] = 2 if variant in WORKERS else 0
    if variant == "weighted":
        sampler = WeightedRandomSampler(range(1, size + 1), size)
        return DataLoader(data, BATCH // record.WORLD, sampler=sampler)
    if variant == "stateful":
        return StatefulDataLoader(data, **options)
    if variant == "stream":
        rows = Rows.from_dict({"at": range(size)}).to_iterable_dataset(2)
        stream = rows.shuffle(seed=3, buffer_size=8).map(lambda row: {"sample": data[row["at"]]})
        return StatefulDataLoader(stream, BATCH)
    return DataLoader(data, **options)


def main(variant: str) -> None:
    seed_everything(3)
    callbacks: list[Any] = [Survive(save_every=3 if variant in ("accumulate", "ragged") else 4)]
    best = ModelCheckpoint("saved", monitor="held_out", save_top_k=1)
    if variant == "early":
        callbacks.append(EarlyStopping("held_out", min_delta=10.0, patience=1))
    if variant == "best":
        callbacks.append(best)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": variant == "best"}
    options |= {"num_sanity_val_steps": 0, "enable_progress_bar": False}
    options |= {"enable_model_summary": False} | VARIANTS[variant]
    if variant == "defaults":
        options |= {"logger": CSVLogger("."), "enable_checkpointing": True}
    trainer = Trainer(
        accelerator="cpu",
        devices=record.WORLD,
        strategy="ddp" if record.WORLD > 1 else "auto",
        plugins=[KempnerEnvironment()],
        callbacks=callbacks,
        **options,
    )
    module = Curve(variant)
    held_out = DataLoader(Points(8), 8 // record.WORLD)
    trainer.fit(module, loader_of(variant), held_out)
    best = trainer.checkpoint_callback if variant == "defaults" else best
    found = Path(best.best_model_path).name if variant in ("best", "defaults") else None
    record.end(module.done, module, best=found)


if __name__ == "__main__":
    main(sys.argv[2])
