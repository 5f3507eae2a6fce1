"""One of some ranks of a test: every world up to theirs saves, every such world loads. Of the model
a part is frozen.

Usage: reshard.py FOLDER [METADATA_UP_TO]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parents[2]))
from saved import open_manager

from kempner.checkpoint.format import compact_index
from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.tensors import file_buffer, state
from kempner.run.record.run_dir import RunDirectory

dist.init_process_group("gloo")
rank = dist.get_rank()
WORLDS = range(1, dist.get_world_size() + 1)
if sys.argv[2:]:
    compact_index.METADATA_UP_TO = int(sys.argv[2])
file_buffer.BASE_FROM = 1
groups = {world: dist.new_group(list(range(world)), backend="gloo") for world in WORLDS}
meshes = {world: DeviceMesh("cpu", torch.arange(world)) for world in WORLDS}


def build(world: int, folder: Path, seed: int) -> tuple[CheckpointEngine, dict[str, Tensor]]:
    """A model of odd sizes over the first `world` ranks, after one step that depends on `seed`."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 600), nn.Linear(600, 3), nn.Linear(3, 1))
    model[1].requires_grad_(False)
    if world > 1:
        for layer in model:
            fully_shard(layer, mesh=meshes[world])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.arange(14.0).view(2, 7) * seed).sum().backward()
    optimizer.step()
    run = RunDirectory(folder)
    manager = open_manager(run, model, optimizer, groups[world])
    return manager, state.capture(model, optimizer)


def whole(table: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: t.full_tensor() if isinstance(t, DTensor) else t.clone() for k, t in table.items()}


for writers in WORLDS:
    folder = Path(sys.argv[1]) / str(writers)
    expected: dict[str, Tensor] = {}
    if rank < writers:
        manager, table = build(writers, folder, seed=3)
        expected = whole(table)
        manager.save(TrainState(step=1, cursor=8, tokens=64))
        manager.join()
        assert len(list(manager._folder.step(1).glob("*.distcp"))) == 2 * writers
        manager.close()
    box = [expected]
    dist.broadcast_object_list(box, 0)
    expected = box[0]
    for readers in WORLDS:
        if rank < readers:
            manager, _ = build(readers, folder, seed=4)
            assert manager.restore() == TrainState(step=1, cursor=8, tokens=64)
            found = whole(
                state.capture(manager._saver._routes.model, manager._saver._routes.optimizer)
            )
            assert found.keys() == expected.keys()
            for key, tensor in found.items():
                assert torch.equal(tensor, expected[key]), f"{key}, {writers} -> {readers}"
            manager.close()
        dist.barrier()
print(f"rank {rank} has seen it all", flush=True)
dist.barrier()
os._exit(0)
