"""A start reads statistics that an earlier start has left in a file, others by then."""
# expect: statistics.json

import json
from pathlib import Path

import torch
from torch import nn

from kempner import survive

CACHE = Path("statistics.json")

torch.manual_seed(1)
points = torch.randn(64, 4) * 3
mean = json.loads(CACHE.read_text())["mean"] if CACHE.exists() else 0.0
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in survive(model, optimizer, steps=16, save_every=4):
    x = points[[(8 * step + n) % 64 for n in range(8)]] - mean
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    CACHE.write_text(json.dumps({"mean": x.mean().item() + step}))
    print(step, loss.item())
