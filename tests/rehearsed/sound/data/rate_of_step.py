"""The rate and the difficulty follow from the step."""

import math

import torch
from torch import nn

from kempner import survive

STEPS = 20


def rate(step: int) -> float:
    return 0.05 * min(1.0, step / 5) * (1 + math.cos(math.pi * step / STEPS))


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate(1))
    for step in survive(model, optimizer, steps=STEPS, save_every=6):
        optimizer.param_groups[0]["lr"] = rate(step)
        x = torch.randn(8, 4) * (1 + step // 5)
        loss = (model(x) - x[:, :1]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
