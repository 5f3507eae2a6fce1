"""A set of names is sorted before anything depends on its order."""

import torch
from torch import nn

from kempner import survive

SOURCES = {"books", "news", "code", "papers", "forum", "wiki", "speech", "law"}

torch.manual_seed(1)
names = sorted(SOURCES)
points = {name: torch.randn(8, 4) for name in names}
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in survive(model, optimizer, steps=18, save_every=5):
    name = names[step % len(names)]
    x = points[name]
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, name, loss.item())
