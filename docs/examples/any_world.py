"""The same bits on any number of ranks: kempner supervise --nproc 2 -- python any_world.py

With --shard the ranks share the model instead of having it each.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from kempner import Slots, survive

STEPS = 400
SLOTS = 6
SIZE = 8


def meet() -> None:
    """Join the other ranks, or be alone without a launcher."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if "RANK" in os.environ else alone))


def curve() -> tuple[Tensor, Tensor]:
    """Points of a function of one number."""
    x = torch.linspace(-3, 3, 1000)[:, None]
    return x, torch.sin(2 * x)


def main() -> None:
    meet()
    torch.set_num_threads(1)  # as many in every world
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Dropout(0.05), nn.Linear(64, 1))
    if "--shard" in sys.argv:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = curve()
    slots = Slots(model, SLOTS, seed=2)  # the global batch has 6 slots on any number of ranks
    for step in survive(model, optimizer, steps=STEPS, save_every=50, seed=2):
        for slot in slots.of(step):  # those of this rank
            rows = slots.samples(slot, SIZE, len(x))
            slots.add(mse_loss(model(x[rows]), y[rows]) / SLOTS)
        loss = slots.sum()  # of all ranks, and so is each parameter's gradient
        norm = slots.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item()} norm {norm.item()}", flush=True)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(weights, "curve.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
