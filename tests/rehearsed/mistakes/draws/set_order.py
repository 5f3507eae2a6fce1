"""The sources are in a set of names, whose order is another in each process."""
# expect: set|hash|order

import torch
from torch import nn

from kempner import survive

SOURCES = {"books", "news", "code", "papers", "forum", "wiki", "speech", "law", "poems", "games"}

torch.manual_seed(1)
points = {name: torch.randn(8, 4) for name in sorted(SOURCES)}
names = list(SOURCES)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in survive(model, optimizer, steps=18, save_every=5):
    x = points[names[step % len(names)]]
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
