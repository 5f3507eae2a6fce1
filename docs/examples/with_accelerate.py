"""Accelerate under kempner: kempner supervise --nproc 2 -- python with_accelerate.py"""

from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import TensorDataset

from kempner import ResumableBatchSampler, ResumableDataLoader, survive

STEPS, ACCUMULATION, BATCH = 90, 2, 8


def main() -> None:
    set_seed(1)
    points = TensorDataset(torch.linspace(0, 1, 960).unsqueeze(1))
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, cpu=not torch.cuda.is_available()
    )
    layers = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
    adam = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(layers, adam)

    steps = survive(model, optimizer, steps=STEPS, save_every=20, seed=1)
    sampler = ResumableBatchSampler(points, BATCH, infinite=True, seed=1)
    done = steps.train_state.step * ACCUMULATION
    sampler.set_position(done * BATCH * accelerator.num_processes)
    batches = iter(ResumableDataLoader(points, sampler, num_workers=2))
    for step in steps:
        for (x,) in islice(batches, ACCUMULATION):
            x = x.to(accelerator.device)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), torch.sin(6 * x))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"step {step} loss {loss.item()}")
    accelerator.save_model(model, "curve")


if __name__ == "__main__":
    main()
