"""survive() is given another seed on each rank."""
# expect: seed
# nproc: 2

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kempner import survive

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in survive(model, optimizer, steps=12, save_every=4, seed=1 + dist.get_rank()):
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
