"""The samples of a step follow from its number, in an order that is shuffled for each epoch."""

import torch
from torch import Tensor, nn

from kempner import survive

POINTS, BATCH = 40, 8


def chosen(step: int) -> Tensor:
    epoch, place = divmod((step - 1) * BATCH, POINTS)
    order = torch.randperm(POINTS, generator=torch.Generator().manual_seed(epoch))
    return order[place : place + BATCH]


torch.manual_seed(1)
points = torch.randn(POINTS, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=18, save_every=5):
    x = points[chosen(step)]
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
