"""The batches get harder by the time since the program began."""
# expect: time|clock

import time

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
began = time.time()
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=15, save_every=4):
    hardness = 1 + (time.time() - began)
    x = torch.randn(8, 4) * hardness
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
