"""The pretrained weights are loaded after survive(), over what it has restored."""
# expect: weight|load

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
pretrained = nn.Linear(4, 1).state_dict()
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = survive(model, optimizer, steps=14, save_every=4)
model.load_state_dict(pretrained)
for step in steps:
    x = torch.randn(8, 4)
    loss = (model(x) - x.mean(1, keepdim=True)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
