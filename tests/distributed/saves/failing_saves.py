"""One rank of a test: saves that fail on one rank. Usage: failing_saves.py FOLDER"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.append(str(Path(__file__).parents[2]))
from saved import open_manager

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.tensors.save import SaveJob
from kempner.run.record.attempts import SupersededError, begin_attempt
from kempner.run.record.events import LedgerEvent
from kempner.run.record.run_dir import RunDirectory

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
run = RunDirectory(Path(sys.argv[1]))
recorded: list[LedgerEvent] = []
manager = open_manager(
    run,
    model,
    optimizer,
    dist.new_group(backend="gloo"),
    record=recorded.append,
)


def step() -> None:
    model(torch.ones(2, 64)).sum().backward()
    manager.release_staging()
    optimizer.step()
    optimizer.zero_grad()


def expect(failures: int, committed: int | None) -> None:
    manager.join()
    assert manager.failures.count == failures, manager.failures.count
    assert manager.committed_step == committed, manager.committed_step


step()
manager.save(TrainState(1))
expect(0, 1)

# The last rank finds its file's name taken: an error of its own thread.
step()
write_files = SaveJob._write_files
if rank == world - 1:

    def sabotaged(job: SaveJob) -> Any:
        job.path.mkdir(parents=True, exist_ok=True)
        (job.path / f"__{rank}_0.distcp").touch()
        return write_files(job)

    SaveJob._write_files = sabotaged  # type: ignore[method-assign]
manager.save(TrainState(2))
if rank == 0:  # sees the failure before it saves again, and the others while they do
    manager.settle()
manager.save(TrainState(2), counted=0)  # as they have voted: the failure has to be counted first
assert manager.in_flight is None
expect(1, 1)
if rank == 0:
    reasons = recorded[-1].to_fields()["reasons"]
    assert list(reasons) == [f"rank {world - 1}"], reasons
    assert "File exists" in reasons[f"rank {world - 1}"], reasons
SaveJob._write_files = write_files  # type: ignore[method-assign]

# Rank 0 cannot commit: a file has the checkpoint's name.
step()
place = CheckpointFolder(run.checkpoints).step(3)
if rank == 0:
    place.touch()
dist.barrier()
manager.save(TrainState(3))
expect(2, 1)
dist.barrier()
if rank == 0:
    assert "rank 0" in recorded[-1].to_fields()["reasons"]
    place.unlink()
dist.barrier()

# A rank that planned something else than the others.
step()
manager.save(TrainState(4))
expect(0, 4)
if rank == 0:
    routes = manager._saver._routes
    ((image, route),) = routes._routes.items()
    layout = replace(route.layout, specs=route.layout.specs[::-1])
    routes._routes[image] = replace(route, layout=layout)
manager.save(TrainState(5))
expect(1, 4)
manager._saver._routes._routes.clear()
step()
manager.save(TrainState(6))
expect(0, 6)

# A newer attempt: every rank learns of it.
dist.barrier()
if rank == 0:
    begin_attempt(run)
dist.barrier()
manager.save(TrainState(7))
with pytest.raises(SupersededError, match="names attempt 2"):
    manager.join()
assert CheckpointFolder(run.checkpoints).latest() == 6
left = [p for p in run.checkpoints.iterdir() if p.name.startswith(".step-0000000")]
dying = [p for p in left if ".a0-" in p.name]  # deletions that the newer attempt goes on with
assert [p for p in left if "00007" not in p.name and p not in dying] == [], left
print(f"rank {rank} has seen it all", flush=True)
os._exit(0)
