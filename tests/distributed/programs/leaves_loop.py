"""Leaves its loop after step 4, on all ranks or on one of them alone."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kempner import survive

dist.init_process_group("gloo")
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=2, shuffle=True)
for step, (batch,) in survive(model, optimizer, data=loader, steps=10, save_every=100):
    optimizer.zero_grad()
    loss = model(batch.unsqueeze(1)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
    optimizer.step()
    print(f"step {step} loss 0 samples {batch.tolist()}", flush=True)
    if step == 4 and ("together" in sys.argv or dist.get_rank() == 1):
        break
print("after the loop", flush=True)
