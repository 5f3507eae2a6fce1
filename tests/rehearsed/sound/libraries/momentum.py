"""SGD with Nesterov momentum, clipped gradients and a convolution."""

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
model = nn.Sequential(
    nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for step in survive(model, optimizer, steps=16, save_every=4, seed=9):
    x = torch.randn(6, 1, 8)
    loss = nn.functional.cross_entropy(model(x), (x.sum((1, 2)) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item())
