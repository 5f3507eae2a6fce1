"""The scheduler steps, and is not registered."""
# expect: scheduler|schedule|lr_scheduler|learning rate

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

for step in survive(model, optimizer, steps=18, save_every=5):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
