"""Lightning's Trainer, with a schedule for each step."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from kempner import ResumableBatchSampler, ResumableDataLoader
from kempner.integrations.lightning import KempnerEnvironment, Survive


class Curve(LightningModule):
    """Learns a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.layers(x), torch.sin(6 * x))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


seed_everything(1)
points = TensorDataset(torch.linspace(0, 1, 80).unsqueeze(1))
trainer = Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=1,
    plugins=[KempnerEnvironment()],
    callbacks=[Survive(save_every=6)],
    use_distributed_sampler=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
)
sampler = ResumableBatchSampler(points, batch_size=8, seed=1)
trainer.fit(Curve(), ResumableDataLoader(points, sampler))
