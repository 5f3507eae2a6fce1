"""A loop over a DataLoader: kempner supervise --nproc 2 -- python own_data.py"""

import os
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from kempner import ResumableBatchSampler, ResumableDataLoader, survive

STEPS = 1000
ACCUMULATION = 2
BATCH = 12  # samples of a micro batch, all ranks together


class Points(Dataset[tuple[int, Tensor, Tensor]]):
    """A thousand points of a curve."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x = torch.tensor([index / 500 - 1])
        return index, x, torch.sin(6 * x)


def meet() -> None:
    """Join the other ranks, or be alone without a launcher."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if "RANK" in os.environ else alone))


def main() -> None:
    meet()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    steps = survive(model, optimizer, steps=STEPS, save_every=50)

    points = Points()
    sampler = ResumableBatchSampler(points, global_batch_size=BATCH, infinite=True, seed=3)
    sampler.set_position(steps.train_state.step * ACCUMULATION * BATCH)
    batches = iter(ResumableDataLoader(points, sampler, num_workers=2))

    for step in steps:
        for indices, x, y in islice(batches, ACCUMULATION):
            print(f"step {step} samples {indices.tolist()}", flush=True)
            # The mean of all samples of the step, also where some ranks have more than others.
            share = len(x) * dist.get_world_size() / (BATCH * ACCUMULATION)
            (mse_loss(model(x), y) * share).backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "points.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
