"""survive() has a shuffled loader with workers, which leaves out the last samples."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    points = TensorDataset(torch.randn(52, 4))
    loader = DataLoader(points, batch_size=8, shuffle=True, num_workers=1, drop_last=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (x,) in survive(model, optimizer, data=loader, steps=16, save_every=5):
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    main()
