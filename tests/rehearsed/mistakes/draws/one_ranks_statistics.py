"""What differs on each rank is registered as `state`, of which rank 0's comes back to all."""
# expect: mean|statistic
# nproc: 2

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kempner import survive


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    statistics = {"mean": 0.0}
    state = {"statistics": statistics}
    for step in survive(model, optimizer, steps=14, save_every=4, state=state):
        x = torch.randn(8, 4) + 10 * rank
        statistics["mean"] += 0.2 * (x.mean().item() - statistics["mean"])
        x = x - statistics["mean"]
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(step, loss.item())
    dist.destroy_process_group()


main()
