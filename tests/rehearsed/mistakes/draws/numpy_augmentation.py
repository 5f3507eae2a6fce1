"""Samples are flipped by a NumPy generator of the data set."""
# expect: flips|rng|generator

import numpy as np
import torch
from torch import Tensor, nn

from kempner import survive


class Flipped:
    """Points, some of them upside down."""

    def __init__(self, count: int) -> None:
        self.points = torch.randn(count, 4)
        self.flips = np.random.default_rng(7)

    def batch(self, step: int) -> Tensor:
        x = self.points[[(8 * step + n) % len(self.points) for n in range(8)]]
        return x * torch.from_numpy(self.flips.choice([-1.0, 1.0], size=(8, 1))).float()


torch.manual_seed(1)
data = Flipped(64)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in survive(model, optimizer, steps=18, save_every=5):
    x = data.batch(step)
    loss = (model(x) - x.abs().sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
