"""Averaged weights of torch, registered, and used in an evaluation."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from kempner import survive

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
held_out = torch.randn(32, 4)
for step in survive(model, optimizer, steps=16, save_every=4, state={"average": average}):
    x = torch.randn(8, 4)
    loss = (model(x) - x.square().sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    if step % 4 == 0:
        average.eval()
        with torch.no_grad():
            print(step, average(held_out).mean().item())
        average.train()
