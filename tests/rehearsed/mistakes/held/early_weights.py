"""Layers are unfrozen when a flag in Python says so; the flag is false again after a start."""
# expect: unfrozen

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
body, head = nn.Linear(4, 8), nn.Linear(8, 1)
model = nn.Sequential(body, nn.Tanh(), head)
body.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
unfrozen = False

for step in survive(model, optimizer, steps=18, save_every=5):
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 4 and not unfrozen:
        body.requires_grad_(True)
        unfrozen = True
    print(step, unfrozen, loss.item())
