"""A schedule that lowers the rate when the loss does not fall, registered."""

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    for step in survive(model, optimizer, steps=20, save_every=5, state={"plateau": plateau}):
        x = torch.randn(8, 4)
        loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plateau.step(loss.item())
        print(step, loss.item())


main()
