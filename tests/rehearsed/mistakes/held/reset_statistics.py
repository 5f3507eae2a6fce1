"""An evaluation before the loop, in training mode, changes the statistics that came back."""
# expect: running_mean|running_var|statistic|buffer|num_batches_tracked

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
held_out = torch.randn(64, 4) * 3 + 1
model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
steps = survive(model, optimizer, steps=16, save_every=4)
with torch.no_grad():
    print("at the start:", model(held_out).mean().item())
for step in steps:
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, 1:2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        model.eval()
        with torch.no_grad():
            print(step, "evaluation", model(held_out).mean().item())
        model.train()
