"""Three micro batches a step, which survive() hands over together."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kempner import survive

torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.randn(60, 4)), batch_size=4, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step, batches in survive(model, optimizer, data=loader, steps=15, save_every=4, accumulate=3):
    optimizer.zero_grad()
    for (x,) in batches:
        loss = (model(x) - x[:, :1]).square().mean() / 3
        loss.backward()
    optimizer.step()
    print(step, loss.item())
