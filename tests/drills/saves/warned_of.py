"""One rank of a drill: what may happen to tensors between and during saves. Usage: FOLDER"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parents[2]))
from saved import open_manager

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.tensors import state
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.run_dir import RunDirectory

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 3))
for layer in model:
    fully_shard(layer, reshard_after_forward=False)
fully_shard(model, reshard_after_forward=False)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
run = RunDirectory(Path(sys.argv[1]))
manager = open_manager(run, model, optimizer, dist.new_group(backend="gloo"))


def forward() -> Tensor:
    return model(torch.ones(2, 2048)).sum()


def update() -> None:
    forward().backward()
    manager.release_staging()
    optimizer.step()
    optimizer.zero_grad()


def swap() -> None:
    """Turn every tensor of the state into another one, in place."""
    for tensor in state.capture(model, optimizer).values():
        state.local_part(tensor).neg_()


def whole() -> dict[str, Tensor]:
    """The state in full, as it is now."""
    table = state.capture(model, optimizer)
    return {k: t.full_tensor() if isinstance(t, DTensor) else t.clone() for k, t in table.items()}


def assert_saved(step: int, expected: dict[str, Tensor]) -> None:
    """The checkpoint holds this, as the stock reader sees it."""
    manager.join()
    assert manager.committed_step == step
    found = {key: torch.full_like(value, float("nan")) for key, value in expected.items()}
    path = CheckpointFolder(run.checkpoints).step(step)
    dcp.load(found, checkpoint_id=path, no_dist=True)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    dist.barrier()


# Parameters are unsharded after a forward pass that no backward pass follows.
update()
expected = whole()
with torch.no_grad():
    forward()
assert not isinstance(next(model[0].parameters()), DTensor), "the drill needs unsharded parameters"
manager.save(TrainState(1))
manager.release_staging()
assert_saved(1, expected)

# Schedule-free optimizers swap the weights in place for evaluation. Once the staging is released,
# they may; what is saved are the weights of the moment of the save.
for step in range(2, 7):
    update()
    expected = whole()
    manager.save(TrainState(step))
    manager.release_staging()
    swap()
    assert_saved(step, expected)
    swap()

# The tensors are others: the next save takes them, and not what the last one took.
optimizer.state.clear()
manager.save(TrainState(7))
manager.release_staging()
assert_saved(7, whole())
model.load_state_dict({key: t.detach() + 1 for key, t in model.state_dict().items()}, assign=True)
manager.save(TrainState(8))
manager.release_staging()
assert_saved(8, whole())

# A loop that replaces parameters would lose what an optimizer keeps for them.
held = nn.Parameter(torch.zeros(1))
optimizer.state[held]["exp_avg"] = torch.zeros(1)
manager.save(TrainState(9))  # fails, on all ranks
with pytest.raises(UsageError, match="create the optimizer afterwards"):
    manager.save(TrainState(10))
assert CheckpointFolder(run.checkpoints).latest() == 8
dist.barrier()
print(f"rank {rank} has seen it all", flush=True)
os._exit(0)
