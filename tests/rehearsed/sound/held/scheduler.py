"""A scheduler that is registered."""

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=18)
for step in survive(model, optimizer, steps=18, save_every=5, state={"schedule": schedule}):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, schedule.get_last_lr(), loss.item())
