"""The batches come from itertools.cycle over a loader: each start begins with the first."""
# expect: batches|sample|loader|cycle|data=

from itertools import cycle

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    points = TensorDataset(torch.randn(80, 4))
    batches = cycle(DataLoader(points, batch_size=8))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (x,) in zip(survive(model, optimizer, steps=16, save_every=4), batches, strict=False):
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
