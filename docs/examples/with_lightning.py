"""Lightning under kempner: kempner supervise --nproc 2 -- python with_lightning.py"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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
    place = KempnerEnvironment()
    trainer = Trainer(
        max_epochs=3,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        plugins=[place],
        devices=place.devices,
        num_nodes=place.num_nodes,
        strategy=place.strategy,
        callbacks=[Survive(save_every=20)],
        logger=False,
    )
    module = Curve()
    trainer.fit(module, DataLoader(points, batch_size=8, shuffle=True, num_workers=2))
    if trainer.is_global_zero:
        torch.save(module.state_dict(), "curve.pt")


if __name__ == "__main__":
    main()
