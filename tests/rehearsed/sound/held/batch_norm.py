"""Batch normalisation, and an evaluation in the right mode."""

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
held_out = torch.randn(64, 4) * 3 + 1
model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in survive(model, optimizer, steps=16, save_every=4):
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, 1:2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        model.eval()
        with torch.no_grad():
            print(step, "evaluation", model(held_out).mean().item())
        model.train()
