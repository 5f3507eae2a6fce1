"""survive() has the shuffled loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kempner import survive

torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step, (x,) in survive(model, optimizer, data=loader, steps=20, save_every=6):
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
