"""One of four ranks of a test: states that no checkpoint can hold.

Usage: unheld_states.py FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[2]))
from saved import open_manager

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.run_dir import RunDirectory

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
group = dist.new_group(backend="gloo")
folder = Path(sys.argv[1])

CHANNELS = 300
"""More than the small tensors have that the first rank always writes."""


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 8))


def opened(name: str, model: nn.Module) -> tuple[CheckpointEngine, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return open_manager(RunDirectory(folder / name), model, optimizer, group), optimizer


def refused(what: Callable[[], object], sentence: str) -> None:
    """Every rank hears the same."""
    with pytest.raises(UsageError, match=sentence) as refusal:
        what()
    told = [""] * world
    dist.all_gather_object(told, str(refusal.value))
    assert set(told) == {told[0]}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, 8, generator=generator) + rank).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def table(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# Shards over a part of the ranks.
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
partly = net()
fully_shard(partly, mesh=mesh["dp"])
refused(
    lambda: opened("part", partly), r"^model\.0\.weight is sharded over a mesh of the ranks 0, 2"
)
replicated = nn.Linear(8, 8)
fully_shard(replicated, mesh=mesh)
opened("replicated", replicated)[0].close()

# A state dict of copies.
cpu = torch.device("cpu")
flat = FullyShardedDataParallel(nn.Linear(8, 8), use_orig_params=False, device_id=cpu)
refused(lambda: opened("flat", flat), r"^model\.weight of model\.state_dict\(\) is a copy")

# Running statistics that differ until the next forward pass, which takes those of rank 0.
parallel = DistributedDataParallel(net())
manager, optimizer = opened("shared", parallel)
train(parallel, optimizer, range(3))
expected = [table(parallel)]
dist.broadcast_object_list(expected)
own = parallel.module.get_buffer("1.running_mean")
assert torch.equal(own, expected[0]["module.1.running_mean"]) == (rank == 0)
manager.save(TrainState(3))
manager.close()
assert manager.committed_step == 3
resumed = DistributedDataParallel(net())
manager, _ = opened("shared", resumed)
assert manager.restore() == TrainState(3)
manager.close()
for name, tensor in table(resumed).items():
    assert torch.equal(tensor, expected[0][name]), name

# Running statistics that the ranks do not share.
alone = DistributedDataParallel(net(), broadcast_buffers=False)
manager, optimizer = opened("alone", alone)
manager.check_state()
train(alone, optimizer, range(1))
differs = r"^model\.1\.running_mean is not the same on rank 0 and rank 1"
refused(manager.check_state, differs)

# They differ only after the check: the save fails, and the next one is refused.
later = DistributedDataParallel(net(), broadcast_buffers=False)
manager, optimizer = opened("later", later)
manager.save(TrainState(1))
manager.join()
assert manager.committed_step == 1
later.module.get_buffer("1.running_mean").add_(float(rank == 2))
manager.save(TrainState(2))
manager.join()
assert (manager.committed_step, manager.failures.count) == (1, 1)
refused(lambda: manager.save(TrainState(3)), r"^model\.1\.running_mean .* rank 0 and rank 2")
print(f"rank {rank} has seen it all", flush=True)
dist.barrier()
os._exit(0)
