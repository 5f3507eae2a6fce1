"""A loop that asks when to stop, and saves: kempner supervise --nproc 2 -- python by_hand.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from kempner import CheckpointManager, ShutdownHandler

STEPS = 200

if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0
torch.manual_seed(1)
curve = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Dropout(0.05), nn.Linear(64, 1))
model = DistributedDataParallel(curve) if dist.is_initialized() else curve
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
torch.manual_seed(2 + rank)

checkpoints = CheckpointManager("runs/by_hand", model, optimizer, state={"schedule": schedule})
start = checkpoints.restore() or 0
with ShutdownHandler() as shutdown:
    for step in range(start + 1, STEPS + 1):
        x = 6 * torch.rand(64, 1) - 3
        loss = mse_loss(model(x), torch.sin(2 * x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0:
            print(f"step {step} loss {loss.item()}", flush=True)
        if step % 20 == 0 or shutdown.should_shutdown():
            checkpoints.save(step)
if rank == 0:
    torch.save(curve.state_dict(), "curve.pt")
