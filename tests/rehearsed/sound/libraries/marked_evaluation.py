"""An evaluation every few steps that draws random numbers, within steps.evaluation()."""

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = survive(model, optimizer, steps=16, save_every=5)
for step in steps:
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        with steps.evaluation(), torch.no_grad():
            model.eval()
            print(step, model(torch.randn(32, 4)).square().mean().item())
            model.train()
