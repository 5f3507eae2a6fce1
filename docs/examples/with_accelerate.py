"""Accelerate under kempner: kempner supervise --nproc 2 -- python with_accelerate.py"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kempner import survive

STEPS, ACCUMULATION, BATCH = 90, 2, 8


def main() -> None:
    set_seed(1)
    points = TensorDataset(torch.linspace(0, 1, 960).unsqueeze(1))
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, cpu=not torch.cuda.is_available()
    )
    layers = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
    adam = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    loader = DataLoader(points, BATCH, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(layers, adam, loader)

    todo = survive(
        model, optimizer, data=loader, accumulate=ACCUMULATION, steps=STEPS, save_every=20
    )
    for step, batches in todo:
        for (x,) in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), torch.sin(6 * x))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"step {step} loss {loss.item()}")
    accelerator.save_model(model, "curve")


if __name__ == "__main__":
    main()
