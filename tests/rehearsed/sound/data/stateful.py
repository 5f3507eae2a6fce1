"""survive() has torchdata's loader."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from kempner import survive

torch.manual_seed(1)
loader = StatefulDataLoader(TensorDataset(torch.randn(48, 4)), batch_size=8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step, (x,) in survive(model, optimizer, data=loader, steps=16, save_every=5):
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
