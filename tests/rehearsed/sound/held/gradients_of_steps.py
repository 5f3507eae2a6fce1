"""Gradients are gathered over three steps of the loop by hand, which survive() holds."""

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in survive(model, optimizer, steps=24, save_every=5):
        x = torch.randn(4, 5)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / 3
        loss.backward()
        if step % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        print(step, loss.item())


main()
