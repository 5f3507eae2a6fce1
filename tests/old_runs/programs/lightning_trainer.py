"""Lightning's Trainer over two epochs."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from notes import end, note, state_of, stop_in
from torch import nn
from torch.utils.data import Dataset

from kempner import ResumableBatchSampler, ResumableDataLoader
from kempner.integrations.lightning import KempnerEnvironment, Survive

SAMPLES = 48


class Points(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, torch.tensor([index / SAMPLES])


class Curve(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        step, state = self.global_step + 1, state_of(self, self.optimizers().optimizer)
        indices, x = batch
        loss = nn.functional.mse_loss(self.layers(x), torch.sin(6 * x))
        note(step, indices.tolist(), loss.item(), state)
        stop_in(step)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    seed_everything(1)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        plugins=[KempnerEnvironment()],
        callbacks=[Survive(save_every=5)],
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    module = Curve()
    sampler = ResumableBatchSampler(Points(), batch_size=4, seed=1)
    trainer.fit(module, ResumableDataLoader(Points(), sampler))
    end(module)


if __name__ == "__main__":
    main()
