"""Lightning under kempner: kempner supervise --nproc 2 -- python with_lightning.py"""

import os

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
        self.layers = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.layers(x), torch.sin(6 * x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    seed_everything(1)
    points = TensorDataset(torch.linspace(0, 1, 960).unsqueeze(1))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        max_epochs=3,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        plugins=[KempnerEnvironment()],
        callbacks=[Survive(save_every=20)],
        use_distributed_sampler=False,
        enable_checkpointing=False,
        logger=False,
    )
    sampler = ResumableBatchSampler(points, batch_size=8, seed=1)
    module = Curve()
    trainer.fit(module, ResumableDataLoader(points, sampler, num_workers=2))
    if trainer.is_global_zero:
        torch.save(module.state_dict(), "curve.pt")


if __name__ == "__main__":
    main()
