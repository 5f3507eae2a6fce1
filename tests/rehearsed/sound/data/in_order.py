"""survive() has a loader in order, whose last batch is smaller."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(45, 4)), batch_size=8)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (x,) in survive(model, optimizer, data=loader, steps=18, save_every=5):
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, len(x), loss.item())


main()
