"""A program that always dies at the same step: python dies_at_step_30.py, as some ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kempner import survive


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in survive(model, optimizer, steps=100, save_every=10):
        if step == 30 and dist.get_rank() == 1:
            raise ValueError("there is no batch 30\nand no other either")
        loss = model(torch.rand(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
