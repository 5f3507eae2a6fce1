"""The epoch is counted by hand, and the batches get harder with it."""
# expect: epoch

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    epoch = 0
    for step in survive(model, optimizer, steps=20, save_every=6):
        x = torch.randn(8, 4) * (1 + epoch)
        loss = (model(x) - x[:, :1]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            epoch = epoch + 1
        print(epoch, step, loss.item())


main()
