"""Lightning's Trainer with SLURMEnvironment(auto_requeue=True), as its pages on Slurm have it.

`#SBATCH --signal=SIGUSR1@90`: at the signal it saves and has the job requeued, and loads that at
the next start; after a crash its last checkpoint is loaded, of those that it makes every few steps.
"""

from __future__ import annotations

from typing import Any

import task
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from shape import BATCH, EPOCHS, EVALUATE_EVERY, SAMPLES, SAVE_EVERY, STEPS
from task import ACCUMULATION, UNDER_KEMPNER, WORLD
from torch import Tensor
from torch.utils.data import DataLoader


class Curve(LightningModule):
    """The task's model, as Lightning wants models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = task.curve()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        indices, x = batch
        loss = task.loss_of(self.layers, x)
        task.note(self.global_step + 1, indices.tolist(), loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            task.evaluating(self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def newest() -> str | None:
    """What the signal's handler has saved, or the last checkpoint, whichever is newer."""
    found = [*task.FOLDER.glob("hpc_ckpt_*.ckpt"), *task.FOLDER.glob("saved/last.ckpt")]
    return str(max(found, key=lambda path: path.stat().st_mtime)) if found else None


def main() -> None:
    seed_everything(1)
    saved = task.FOLDER / "saved"
    options: dict[str, Any] = {
        "devices": WORLD,
        "plugins": [SLURMEnvironment(auto_requeue=True)],
        "callbacks": [ModelCheckpoint(saved, every_n_train_steps=SAVE_EVERY, save_last=True)],
        "strategy": "ddp_find_unused_parameters_true" if WORLD > 1 else "auto",
    }
    resume = newest()
    if UNDER_KEMPNER:
        from kempner.integrations.lightning import KempnerEnvironment, Survive

        place = KempnerEnvironment()
        options |= {"devices": place.devices, "plugins": [place], "strategy": place.strategy}
        options |= {"callbacks": [Survive(save_every=SAVE_EVERY)], "enable_checkpointing": False}
        resume = None
    trainer = Trainer(
        default_root_dir=task.FOLDER,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATION,
        val_check_interval=EVALUATE_EVERY * ACCUMULATION,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Curve()
    loader = DataLoader(task.Points(), BATCH, shuffle=True, num_workers=task.WORKERS)
    held_out = DataLoader(task.Points(), SAMPLES)
    trainer.fit(module, loader, held_out, ckpt_path=resume)
    if trainer.state.status == "finished" and trainer.global_step >= STEPS:
        task.finish(module)


if __name__ == "__main__":
    main()
