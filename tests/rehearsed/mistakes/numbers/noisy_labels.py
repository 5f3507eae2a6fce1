"""A sample's noisy label is drawn when it is first seen, and kept in a dict."""
# expect: labels

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
points = torch.randn(12, 4)
labels: dict[int, float] = {}
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=20, save_every=5):
    chosen = [(4 * step + n) % len(points) for n in range(4)]
    for index in chosen:
        if index not in labels:
            labels[index] = points[index].sum().item() + torch.randn(()).item()
    wanted = torch.tensor([[labels[index]] for index in chosen])
    loss = (model(points[chosen]) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
