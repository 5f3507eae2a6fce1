"""A start reads what an earlier one has computed once, and would compute itself."""

import json
from pathlib import Path

import torch
from torch import nn

from kempner import survive

CACHE = Path("points.json")

torch.manual_seed(1)
if CACHE.exists():
    rows = json.loads(CACHE.read_text())
else:
    made = torch.Generator().manual_seed(4)
    rows = torch.randn(32, 4, generator=made).tolist()
    CACHE.write_text(json.dumps(rows))
points = torch.tensor(rows)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=15, save_every=4):
    x = points[[(8 * step + n) % 32 for n in range(8)]]
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
