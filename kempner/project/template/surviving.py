"""The same loop, and it survives: kempner supervise --nproc 2 -- python surviving.py"""

import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from kempner import survive

STEPS = 200
BATCH = 64
RATE = 3e-3


class Curve(nn.Module):
    """Learns a function of one number."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, width),
            nn.GELU(),
            nn.Dropout(0.05),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def draw_batch() -> tuple[Tensor, Tensor]:
    """Points of the curve, others at every step and on every rank."""
    x = 6 * torch.rand(BATCH, 1) - 3
    return x, torch.sin(2 * x)


def rate(step: int) -> float:
    """Half a cosine, from the full rate to none."""
    return RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def meet() -> None:
    """Join the other ranks, or be alone without a launcher."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if "RANK" in os.environ else alone))


def main() -> None:
    meet()
    torch.manual_seed(1)
    model = DistributedDataParallel(Curve())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in survive(model, optimizer, steps=STEPS, save_every=20, seed=2):
        x, y = draw_batch()
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item()}", flush=True)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "curve.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
