"""Averaged weights in a dict of tensors, which is registered."""

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in survive(model, optimizer, steps=18, save_every=5, state={"average": average}):
        x = torch.randn(8, 4)
        loss = (model(x) - x[:, :1]).square().mean()
        loss = loss + 0.1 * sum(
            (p - average[n]).square().sum() for n, p in model.named_parameters()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.1)
        print(step, loss.item())


main()
