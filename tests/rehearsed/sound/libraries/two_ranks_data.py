"""Two ranks share the samples of a kempner loader."""
# nproc: 2

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from kempner import ResumableBatchSampler, ResumableDataLoader, survive


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    points = TensorDataset(torch.randn(64, 4))
    sampler = ResumableBatchSampler(points, global_batch_size=8, seed=2)
    loader = ResumableDataLoader(points, sampler)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (x,) in survive(model, optimizer, data=loader, steps=14, save_every=4):
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(step, loss.item())
    dist.destroy_process_group()


main()
