"""Hard samples are drawn more often, by an array of their last losses."""
# expect: hardness

import numpy as np
import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    points = torch.randn(40, 4)
    hardness = np.ones(len(points))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in survive(model, optimizer, steps=16, save_every=4):
        chances = torch.from_numpy(hardness / hardness.sum())
        chosen = torch.multinomial(chances, 8)
        x = points[chosen]
        losses = (model(x) - x[:, :1]).square().squeeze(1)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        hardness[chosen.numpy()] = losses.detach().double().numpy()
        print(step, losses.mean().item())


main()
