"""Two ranks, each with its own draws of torch."""
# nproc: 2

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kempner import survive


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in survive(model, optimizer, steps=14, save_every=4):
        x = torch.randn(8, 4)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(step, loss.item())
    dist.destroy_process_group()


main()
