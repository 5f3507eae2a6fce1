"""Each rank draws its samples from a generator seeded by `seed + rank`, which nothing saves."""
# expect: draws|generator|sample
# nproc: 2

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kempner import survive

SEED = 5


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    points = torch.randn(64, 4)
    draws = torch.Generator().manual_seed(SEED + dist.get_rank())
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in survive(model, optimizer, steps=14, save_every=4):
        x = points[torch.randint(len(points), (4,), generator=draws)]
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(step, loss.item())
    dist.destroy_process_group()


main()
