"""Trains by Lightning's Trainer, once for each name: lightning_fits.py NAME...

`options.json` has the Trainer's: another command would be another run. Each batch,
validation and end is a line of `notes.jsonl`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trouble import strike

from kempner.integrations.lightning import KempnerEnvironment, Survive

NOTES = Path("notes.jsonl")


class Line(LightningModule):
    """Learns a line."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def note(self, *facts: object) -> None:
        with open(NOTES, "a") as notes:
            notes.write(json.dumps([self.name, *facts]) + "\n")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.float()[:, None] / 48
        loss = (self.layers(x) - x).square().mean()
        self.note("step", self.global_step + 1, batch.tolist(), loss.item().hex())
        if self.name == "troubled":
            strike(self.global_step + 1)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("held_out", self.layers(batch.float()[:, None]).square().mean())
        self.note("validation", self.global_step, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(name: str, options: dict[str, Any]) -> None:
    """One run."""
    callbacks: list[Any] = [Survive(save_every=4)]
    if options.pop("early", False):
        callbacks.append(EarlyStopping("held_out", min_delta=1e9, patience=0))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        plugins=[KempnerEnvironment()],
        callbacks=callbacks,
        enable_checkpointing=False,
        **quiet,
        **options,
    )
    module = Line(name)
    trainer.fit(module, DataLoader(range(48), 8, shuffle=True), DataLoader(range(8), 4))  # type: ignore[arg-type]
    shown = {key: float(value).hex() for key, value in trainer.callback_metrics.items()}
    weights = [float(weight.sum()).hex() for weight in module.parameters()]
    module.note("end", trainer.global_step, trainer.current_epoch, shown, weights)


if __name__ == "__main__":
    seed_everything(1)
    for name in sys.argv[1:]:
        fit(name, json.loads(Path("options.json").read_text()))
