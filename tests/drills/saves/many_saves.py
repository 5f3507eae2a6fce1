"""One rank of a drill: many saves in a row. Usage: many_saves.py FOLDER WARM_UP SAVES

Rank 0 prints what it uses after the first WARM_UP saves and after SAVES more.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.append(str(Path(__file__).parents[2]))
from harness import wait_until
from saved import open_manager

from kempner.checkpoint.format.manifest import TrainState
from kempner.run.record.run_dir import RunDirectory

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
warm_up, saves = map(int, sys.argv[2:])
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 3))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
run = RunDirectory(Path(sys.argv[1]))
manager = open_manager(run, model, optimizer, dist.new_group(backend="gloo"))


def pruned() -> bool:
    """Nothing is left to delete, which happens beside and would be seen as an open folder."""
    names = [path.name for path in run.checkpoints.iterdir() if "step-" in path.name]
    return len(names) <= 2


def usage() -> dict[str, int]:
    gc.collect()
    me = psutil.Process()
    return {
        "rank": rank,
        "resident": me.memory_info().rss,
        "threads": me.num_threads(),
        "descriptors": me.num_fds(),
    }


for step in range(1, 1 + warm_up + saves):
    model(torch.ones(2, 256)).sum().backward()
    manager.release_staging()
    optimizer.step()
    optimizer.zero_grad()
    manager.save(TrainState(step))
    if step in (warm_up, warm_up + saves):
        manager.join()
        wait_until(pruned, "the old ones to be gone")
        assert manager.committed_step == step
        dist.barrier()
        # At once, with its end of line: the other rank writes to the same file.
        sys.stdout.write(f"{json.dumps(usage())}\n")
        sys.stdout.flush()
dist.barrier()
print(f"rank {rank} has seen it all", flush=True)
os._exit(0)
