"""Loss scaling by hand: the scale grows after four good steps, and is a local variable."""
# expect: scale|good

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scale, good = 1024.0, 0
    for step in survive(model, optimizer, steps=18, save_every=5):
        x = torch.randn(8, 4)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        (loss * scale).backward()
        for p in model.parameters():
            p.grad.div_(scale * 1.001)
        nn.utils.clip_grad_norm_(model.parameters(), 1 + scale / 1e5)
        optimizer.step()
        good = good + 1
        if good % 4 == 0:
            scale *= 3
        print(step, loss.item())


main()
