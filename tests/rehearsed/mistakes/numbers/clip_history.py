"""Gradients are clipped at the median of the last norms, which a list keeps."""
# expect: norms

import statistics

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
norms: list[float] = []
for step in survive(model, optimizer, steps=18, save_every=5):
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, :2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    limit = 0.5 * statistics.median(norms) if norms else 1.0
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
    optimizer.step()
    print(step, loss.item())
