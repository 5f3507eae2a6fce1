"""Early stopping counts in local variables how long nothing has improved."""
# expect: waited|lowest

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lowest, waited = float("inf"), 0
    for step in survive(model, optimizer, steps=20, save_every=5):
        x = torch.randn(8, 4)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lowest, waited = min(lowest, loss.item()), 0 if loss.item() < lowest else waited + 1
        if waited > 15:
            print("stopped early after step", step)
            break


main()
