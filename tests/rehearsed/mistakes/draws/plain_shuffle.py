"""A shuffled DataLoader is iterated by the loop itself, which begins a new order at each start."""
# expect: shuffle|loader|sample|data=

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kempner import survive

torch.manual_seed(1)
points = TensorDataset(torch.randn(64, 4))
loader = DataLoader(points, batch_size=8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = iter(loader)
for step in survive(model, optimizer, steps=20, save_every=6):
    try:
        (x,) = next(batches)
    except StopIteration:
        batches = iter(loader)
        (x,) = next(batches)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
