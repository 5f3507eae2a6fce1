"""Gradients are gathered over three steps in a list of the program, which nothing saves."""
# expect: gathered

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gathered = [torch.zeros_like(p) for p in model.parameters()]
    for step in survive(model, optimizer, steps=24, save_every=5):
        x = torch.randn(4, 5)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / 3
        optimizer.zero_grad()
        loss.backward()
        for kept, p in zip(gathered, model.parameters(), strict=True):
            kept.mul_(0.7).add_(p.grad)
            p.grad.copy_(kept)
        optimizer.step()
        print(step, loss.item())


main()
