"""A generator of one's own for the noise, registered."""

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
noise = torch.Generator().manual_seed(3)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=16, save_every=4, state={"noise": noise}):
    x = torch.randn(8, 4)
    noisy = x + 0.3 * torch.randn(x.shape, generator=noise)
    loss = (model(noisy) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
