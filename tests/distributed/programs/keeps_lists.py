"""A loop whose optimizer keeps lists, from its first step on: no checkpoint holds those."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner import survive

dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters())


def closure() -> Tensor:
    """The same loss on every rank."""
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss


for step in survive(model, optimizer, steps=100, save_every=50):
    optimizer.step(closure)
    print(f"step {step} is done", flush=True)
