"""The learning rate decays in a local variable."""
# expect: rate

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    rate = 0.2
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in survive(model, optimizer, steps=16, save_every=4):
        x = torch.randn(8, 4)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        rate *= 0.93
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        print(step, loss.item())


main()
