"""Augmentation by a NumPy generator and a random.Random, both registered."""

import random

import numpy as np
import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    rng, picker = np.random.default_rng(7), random.Random(2)
    points = torch.randn(64, 4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = {"rng": rng, "picker": picker}
    for step in survive(model, optimizer, steps=18, save_every=5, state=state):
        x = points[picker.sample(range(64), 8)]
        x = x * torch.from_numpy(rng.choice([-1.0, 1.0], size=(8, 1))).float()
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
