"""Samples are picked by a random.Random of the program."""
# expect: picker

import random

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    points, picker = torch.randn(64, 4), random.Random(3)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in survive(model, optimizer, steps=16, save_every=4):
        x = points[picker.sample(range(64), 8)]
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
