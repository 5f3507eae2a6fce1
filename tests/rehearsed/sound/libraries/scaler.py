"""A GradScaler that is registered, in bfloat16 where torch's autocast wants it."""

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
for step in survive(model, optimizer, steps=16, save_every=5, state={"scaler": scaler}):
    x = torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        predicted = model(x)
    loss = (predicted.float() - x[:, :1]).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, scaler.get_scale(), loss.item())
