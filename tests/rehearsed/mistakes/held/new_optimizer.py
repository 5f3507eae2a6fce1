"""The loop steps another optimizer than the one that survive() was given."""
# expect: optimizer|stepped|finetuning

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = survive(model, optimizer, steps=16, save_every=4)
finetuning = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in steps:
    x = torch.randn(8, 4)
    loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
    finetuning.zero_grad()
    loss.backward()
    finetuning.step()
    print(step, loss.item())
