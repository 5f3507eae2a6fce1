"""The batches come from a generator without a seed."""
# expect: undisturbed|seed

import numpy as np
import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
rng = np.random.default_rng()
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=14, save_every=4):
    x = torch.from_numpy(rng.normal(size=(8, 4))).float()
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
