"""Lookahead: the slow weights are a list of tensors that nothing saves."""
# expect: slow

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slow = [p.detach().clone() for p in model.parameters()]
    for step in survive(model, optimizer, steps=20, save_every=6):
        x = torch.randn(8, 6)
        loss = (model(x) - x[:, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            with torch.no_grad():
                for kept, p in zip(slow, model.parameters(), strict=True):
                    kept += 0.5 * (p - kept)
                    p.copy_(kept)
        print(step, loss.item())


main()
