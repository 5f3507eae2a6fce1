"""A LightningModule masks its inputs by a generator of its own."""
# expect: mask_draws

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from kempner import ResumableBatchSampler, ResumableDataLoader
from kempner.integrations.lightning import KempnerEnvironment, Survive


class Masked(LightningModule):
    """Learns to fill in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask_draws = torch.Generator().manual_seed(2)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        mask = torch.rand(x.shape, generator=self.mask_draws) < 0.5
        return nn.functional.mse_loss(self.layer(x * mask), x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


seed_everything(1)
points = TensorDataset(torch.randn(48, 4))
trainer = Trainer(
    max_steps=18,
    accelerator="cpu",
    devices=1,
    plugins=[KempnerEnvironment()],
    callbacks=[Survive(save_every=5)],
    use_distributed_sampler=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
)
sampler = ResumableBatchSampler(points, batch_size=8, seed=1)
trainer.fit(Masked(), ResumableDataLoader(points, sampler))
