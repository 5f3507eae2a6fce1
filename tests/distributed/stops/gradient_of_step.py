"""One rank of a test: the full gradient of the next step of a run, written by rank 0.

Usage: gradient_of_step.py OUT CONFIG [--section.key=value]...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from kempner.config.loading import load
from kempner.run.record.attempts import Attempt, begin_attempt
from kempner.training.build import build
from kempner.training.fault_injection import arm
from kempner.training.groups.process_groups import connect
from kempner.training.rank_link.rank_link import open_rank_link
from kempner.training.rank_link.shutdown import StopListener

config = load(Path(sys.argv[2]), sys.argv[3:])
shutdown = StopListener()
rank_link = open_rank_link(config, shutdown)
faults = arm(config, rank_link)
ranks = connect(rank_link.world, config)
attempt = ranks.broadcast(begin_attempt(rank_link.run) if ranks.world.rank == 0 else None)
assert isinstance(attempt, Attempt)
training = build(config, rank_link, ranks, attempt, shutdown, faults)
batch = training.tools.data.feed.take(give_up=lambda: False)
assert batch is not None
loss = training.gradient.add(batch.micro, training.train_state.step + 1)
gradient = {}
for name, parameter in training.model.named_parameters():
    assert parameter.grad is not None
    full = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    gradient[name] = full.clone()
if ranks.world.rank == 0:
    torch.save({"loss": loss, "gradient": gradient, "step": training.train_state.step}, sys.argv[1])
training.tools.data.feed.close()
print(f"rank {ranks.world.rank} has seen it all", flush=True)
ranks.final_barrier()
os._exit(0)
